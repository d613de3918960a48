// 4-bit weights times 16-bit activations on Hopper: out[m, n] = sum_k x[m, k] * w[n, k]. Weights are the left operand
// and never leave the registers that they are unpacked in. Here: what both kernels share.
//
// Two threads or warps bring packed words and activations of one unit to a ring in shared memory; warpgroups unpack and
// multiply. A unit is one step, 128 channels, of an output tile; programs share the units of all tiles evenly. Defines
// come from `w4a16_hopper.py`:
//   BM, ROWS        tokens and output channels of a tile
//   STAGES          of the ring
//   WARPGROUPS      that multiply
//   HALF            0 bf16, 1 fp16
//   GROUPS          of a step: 1, 2, 4
//   SCALE           0 fp16, 1 bf16, 2 fp32
//   HAS_ZEROS, and MIDDLE, the zero point without zeros
//   REGISTERS, PRODUCE_REGISTERS   of a thread that multiplies, produces
//   BURST, BUFFERS, WGMMA   of w4a16_hopper_many.cu; BURST is 0 for w4a16_hopper_few.cu
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

constexpr int TILES = ROWS / 64;          // packed tiles of a step
constexpr int SUB = TILES / WARPGROUPS;   // of a warpgroup
constexpr int PIECES = SUB * (BM / 8);    // of 64 outputs by 8 tokens
constexpr int SCALE_BYTES = SCALE == 2 ? 4 : 2;
constexpr int X_BYTES = BM * 256;
constexpr int W_BYTES = ROWS * 64;
constexpr int S_BYTES = GROUPS * ROWS * SCALE_BYTES;
constexpr int Z_BYTES = HAS_ZEROS ? GROUPS * ROWS : 0;
constexpr int W_AT = STAGES * X_BYTES;
constexpr int S_AT = W_AT + STAGES * W_BYTES;
constexpr int Z_AT = S_AT + STAGES * S_BYTES;
constexpr int BAR_AT = Z_AT + STAGES * Z_BYTES;
constexpr u32 MAGIC = HALF ? 0x64006400u : 0x43004300u;  // of 1024 or 128: a code in the low bits adds its value
constexpr float SUM_UNIT = BURST > 0 && !HALF ? 0x1p48f : 1.0f;  // bf16 weights of many tokens are that much too small
constexpr int MULTIPLIERS = 128 * WARPGROUPS;
constexpr int THREADS = MULTIPLIERS + 128;

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ __forceinline__ void barrier_init(u32 bar, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count));
}
__device__ __forceinline__ void barrier_arrive(u32 bar) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}
__device__ __forceinline__ void barrier_expect(u32 bar, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
__device__ __forceinline__ void barrier_wait(u32 bar, u32 parity) {
  asm volatile(
      "{\n.reg .pred p;\nWAIT:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
      "@p bra DONE;\nbra WAIT;\nDONE:\n}" ::"r"(bar), "r"(parity) : "memory");
}
__device__ __forceinline__ void copy_bulk(u32 to, const void* from, u32 bytes, u32 bar) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "l"(from), "r"(bytes), "r"(bar) : "memory");
}
__device__ __forceinline__ void wait_for_kernel_before() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
#if HALF
#define T2 "f16x2"
#else
#define T2 "bf16x2"
#endif
__device__ __forceinline__ u32 sub2(u32 a, u32 b) {
  u32 d;
  asm("sub." T2 " %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}
__device__ __forceinline__ u32 mul2(u32 a, u32 b) {
  u32 d;
  asm("mul." T2 " %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}
__device__ __forceinline__ u32 pack2(float low, float high) {
  u32 d;
  asm("cvt.rn." T2 ".f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
  return d;
}
__device__ __forceinline__ float half_to_float(u16 v) {
  float f;
  asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(v));
  return f;
}
__device__ __forceinline__ float bf16_to_float(u16 v) { return __uint_as_float((u32)v << 16); }
__device__ __forceinline__ float load_scale(const char* at, int index) {
#if SCALE == 0
  return half_to_float(((const u16*)at)[index]);
#elif SCALE == 1
  return bf16_to_float(((const u16*)at)[index]);
#else
  return ((const float*)at)[index];
#endif
}

struct Problem {
  const u16* x;
  const char* packed;
  const char* scales;
  const u8* zeros;
  const u16* bias;
  u16* out;
  int M, N, K, group, groups;
  int steps, tiles_m;  // of a tile, of the tokens
  int units;           // unit u is step u % steps of tile u / steps
  int begin, end;      // of this program
  float4* partial;     // [programs, WARPGROUPS, PIECES, 128] parts of tiles
  int* counters;       // [programs, WARPGROUPS], zero before and after a launch
};

__device__ __forceinline__ int first_unit(int program, int units) {
  return (int)((long long)units * program / gridDim.x);
}
__device__ __forceinline__ int program_of(int unit, int units) {
  return (int)(((long long)(unit + 1) * gridDim.x - 1) / units);
}

__device__ __forceinline__ u32 zero_of(const char* smem, int stage, int g, int row) {
  return (HAS_ZEROS ? ((const u8*)smem + Z_AT + stage * Z_BYTES + g * ROWS)[row] : MIDDLE) * 0x00010001u;
}

__device__ __forceinline__ float bias_of(const u16* bias, int n, int N) {
  if (bias == nullptr || n >= N) return 0.0f;
  return HALF ? half_to_float(bias[n]) : bf16_to_float(bias[n]);
}

// 16 outputs by 8 tokens of a warp, [output][token]: two neighbouring outputs of one token in one word.
__device__ __forceinline__ void store_block(float4 v, const u16* bias, u16* out, int m, int n, int M, int N) {
  const int lane = threadIdx.x % 32;
  const bool odd = lane & 4;
  m += 2 * (lane % 4) + odd;
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const int row = n + 8 * h + lane / 4;
    const float b = bias_of(bias, row, N);
    const float v0 = (h ? v.z : v.x) * SUM_UNIT + b, v1 = (h ? v.w : v.y) * SUM_UNIT + b;
    const float other = __shfl_xor_sync(~0u, odd ? v0 : v1, 4);
    const u32 word = odd ? pack2(other, v1) : pack2(v0, other);
    if (m < M && row < N) *(u32*)(out + (long long)m * N + (row & ~1)) = word;
  }
}

__device__ __forceinline__ void store_piece(const Problem& p, int tile, int piece, float4 sum) {
  const int block = tile / p.tiles_m * TILES + threadIdx.x / 128 * SUB + piece / (BM / 8);
  store_block(sum, p.bias, p.out, tile % p.tiles_m * BM + piece % (BM / 8) * 8, block * 64 + threadIdx.x % 128 / 32 * 16,
              p.M, p.N);
}

__device__ __forceinline__ float4 piece_of(const float (&acc)[SUB][BM / 2], int piece) {
  const float* v = &acc[piece / (BM / 8)][piece % (BM / 8) * 4];
  return make_float4(v[0], v[1], v[2], v[3]);
}

__device__ __forceinline__ float4* part_of(const Problem& p, int program) {
  return p.partial + (long long)(program * WARPGROUPS + threadIdx.x / 128) * (PIECES * 128) + threadIdx.x % 128;
}
__device__ __forceinline__ void wait_for(const int* counter, int count) {
  int here;
  do asm volatile("ld.acquire.gpu.s32 %0, [%1];" : "=r"(here) : "l"(counter) : "memory");
  while (here < count);
}
__device__ __forceinline__ void add(float4& sum, float4 v) {
  sum.x += v.x;
  sum.y += v.y;
  sum.z += v.z;
  sum.w += v.w;
}
__device__ __forceinline__ void warpgroup_sync() {
  asm volatile("bar.sync %0, 128;" ::"r"(1 + threadIdx.x / 128) : "memory");
}

__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

__device__ __forceinline__ void write_part(const Problem& p, const float (&acc)[SUB][BM / 2]) {
#pragma unroll
  for (int i = 0; i < PIECES; i++) __stcg(part_of(p, blockIdx.x) + i * 128, piece_of(acc, i));
  __threadfence();
  warpgroup_sync();
}

// Programs of a shared tile in its counter: how many have written (bits 0 to 7), are done (8 to 15), which have left.
constexpr u32 ONE_DONE = 1 << 8, ONE_LEFT = 1 << 16;
constexpr long long PATIENCE = 200000;  // clocks, 0.1 ms

// The shares that this program shall add, a bit each; none when it has left its own to the last one that writes. Who
// waits keeps its place: programs of many streams, each waiting for others of its launch, could keep all places for ever.
__device__ __forceinline__ u32 claim_shares(u32* counter, int count, int mine) {
  u32 state, shares = 1u << mine;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(state) : "l"(counter) : "memory");
  if ((state & 255) == count - 1) {
    shares |= state >> 16;
  } else {
    const long long begin = clock64();
    do asm volatile("ld.acquire.gpu.u32 %0, [%1];" : "=r"(state) : "l"(counter) : "memory");
    while ((state & 255) < count && clock64() - begin < PATIENCE);
    if ((state & 255) < count) {
      asm volatile("atom.acq_rel.gpu.global.or.b32 %0, [%1], %2;" : "=r"(state) : "l"(counter), "r"(ONE_LEFT << mine)
                   : "memory");
      if ((state & 255) < count) return 0;
    }
  }
  const int done = __popc(shares);
  if ((atomicAdd(counter, done * ONE_DONE) >> 8 & 255) + done == count) *counter = 0;  // nobody looks any more
  return shares;
}

// Every `count`th piece of a tile, summed over the programs from `first` on.
__device__ __forceinline__ void add_share(const Problem& p, int tile, int first, int count, int share) {
  const int warpgroup = threadIdx.x / 128;
  constexpr int TOGETHER = PIECES < 4 ? PIECES : 4;  // pieces, for enough loads under way
  const int shift = warpgroup * PIECES % count;      // evens out what the warpgroups do
  for (int i = (share + shift) % count; i < PIECES; i += TOGETHER * count) {
    float4 sum[TOGETHER];
#pragma unroll
    for (int q = 0; q < TOGETHER; q++) sum[q] = make_float4(0, 0, 0, 0);
#pragma unroll 4
    for (int program = first; program < first + count; program++)
#pragma unroll
      for (int q = 0; q < TOGETHER; q++)
        if (i + q * count < PIECES) add(sum[q], __ldcg(part_of(p, program) + (i + q * count) * 128));
#pragma unroll
    for (int q = 0; q < TOGETHER; q++)
      if (i + q * count < PIECES) store_piece(p, tile, i + q * count, sum[q]);
  }
}

// Where every tile has as many programs, all done at the same time, each adds a share of the pieces.
__device__ __forceinline__ void share_tile(const Problem& p, int tile, const float (&acc)[SUB][BM / 2]) {
  __shared__ u32 claimed[WARPGROUPS];
  const int warpgroup = threadIdx.x / 128, count = p.steps * gridDim.x / p.units, first = tile * count;
  write_part(p, acc);
  if (threadIdx.x % 128 == 0)
    claimed[warpgroup] = claim_shares((u32*)p.counters + first * WARPGROUPS + warpgroup, count, blockIdx.x - first);
  warpgroup_sync();
  for (u32 shares = claimed[warpgroup]; shares; shares &= shares - 1) add_share(p, tile, first, count, __ffs(shares) - 1);
}

// Two programs of a tile are a cluster: each writes half of its part into the other's ring once both are done with it.
__device__ __forceinline__ void share_with_neighbour(const Problem& p, int tile, const float (&acc)[SUB][BM / 2]) {
  extern __shared__ __align__(1024) char ring[];
  const bool second = blockIdx.x % 2;
  const u32 here = shared_address(ring) + (threadIdx.x / 128 * (PIECES / 2) * 128 + threadIdx.x % 128) * 16;
  u32 there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(here), "r"(second ? 0 : 1));
  cluster_sync();
#pragma unroll
  for (int i = 0; i < PIECES; i += 2) {
    const float4 v = second ? piece_of(acc, i) : piece_of(acc, i + 1);
    asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(there + i / 2 * 2048), "f"(v.x), "f"(v.y),
                 "f"(v.z), "f"(v.w) : "memory");
  }
  cluster_sync();
#pragma unroll
  for (int i = 0; i < PIECES; i += 2) {
    float4 sum = second ? piece_of(acc, i + 1) : piece_of(acc, i), v;
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(here + i / 2 * 2048) : "memory");
    add(sum, v);
    store_piece(p, tile, i + second, sum);
  }
}

// Else the program that begins a tile waits for the ones after it, whose first work that was, and adds what they wrote.
// Programs are placed in the order of their index, so far, so those have places: CUDA does not promise it.
__device__ __forceinline__ void collect_tile(const Problem& p, int tile, int k_begin, float (&acc)[SUB][BM / 2]) {
  if (k_begin > 0) {
    write_part(p, acc);
    int* counter = p.counters + blockIdx.x * WARPGROUPS + threadIdx.x / 128;
    if (threadIdx.x % 128 == 0) asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(counter) : "memory");
    return;
  }
  const int last = program_of(tile * p.steps + p.steps - 1, p.units);
  for (int program = blockIdx.x + 1; program <= last; program++) {
    if (threadIdx.x % 128 == 0) {
      int* counter = p.counters + program * WARPGROUPS + threadIdx.x / 128;
      wait_for(counter, 1);
      *counter = 0;
    }
    warpgroup_sync();
#pragma unroll
    for (int i = 0; i < PIECES; i++) {
      float* v = &acc[i / (BM / 8)][i % (BM / 8) * 4];
      const float4 part = __ldcg(part_of(p, program) + i * 128);
      v[0] += part.x;
      v[1] += part.y;
      v[2] += part.z;
      v[3] += part.w;
    }
  }
#pragma unroll
  for (int i = 0; i < PIECES; i++) store_piece(p, tile, i, piece_of(acc, i));
}

// After a program's last step of a tile. Parts are added in the order of the programs, so a result does not depend on
// timing.
__device__ __forceinline__ void end_tile(const Problem& p, int tile, int k_begin, float (&acc)[SUB][BM / 2]) {
  const int tiles = p.units / p.steps;
  if (BURST > 0 && gridDim.x == 2 * tiles)
    share_with_neighbour(p, tile, acc);
  else if (gridDim.x > tiles && gridDim.x % tiles == 0)
    share_tile(p, tile, acc);
  else
    collect_tile(p, tile, k_begin, acc);
}

#define SET_REGISTERS(direction, count) \
  if (count) asm volatile("setmaxnreg." direction ".sync.aligned.u32 %0;" ::"n"(count ? count : 24))

__device__ __forceinline__ void begin_barriers(u32 full, u32 empty, int filled) {
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; i++) {
      barrier_init(full + 8 * i, filled);
      barrier_init(empty + 8 * i, 4 * WARPGROUPS);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
