// 4-bit weights times 16-bit activations on Hopper: out[m, n] = sum_k x[m, k] * w[n, k]. Weights are the left operand
// and never leave the registers that they are unpacked in. Here: what both kernels share.
//
// A warpgroup of producers brings packed words (bulk copies) and activations (16-byte copies, swizzled) of one unit to
// a ring in shared memory; the others unpack and multiply. A unit is one step, 128 channels, of an output tile. Parts of
// a tile are added in a fixed order, so a result does not depend on timing. Defines come from `w4a16_hopper.py`:
//   BM, ROWS        tokens and output channels of a tile
//   STAGES          of the ring
//   WARPGROUPS      that multiply
//   SPLIT           programs of a cluster
//   HALF            0 bf16, 1 fp16
//   GROUPS          of a step: 1, 2, 4
//   SCALE           0 fp16, 1 bf16, 2 fp32
//   HAS_ZEROS, HAS_PERM, and MIDDLE, the zero point without zeros
//   REGISTERS, PRODUCE_REGISTERS   of a thread that multiplies, produces
//   EXACT, WGMMA    of w4a16_hopper_many.cu
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

static_assert(STAGES >= 4, "four producers take turns: with fewer stages one could take a phase for the next");
constexpr int TILES = ROWS / 64;          // packed tiles of a step
constexpr int SUB = TILES / WARPGROUPS;   // of a warpgroup
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
__device__ __forceinline__ void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ __forceinline__ void wait_for_kernel_before() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}
// Of warps that multiply nothing: the barriers of the sum count every thread.
__device__ __forceinline__ void meet_the_cluster() {
  if (SPLIT > 1) {
    cluster_sync();
    cluster_sync();
  }
}
__device__ __forceinline__ float4 load_remote(u32 at, int rank) {
  float4 v;
  asm volatile(
      "{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %4, %5;\n"
      "ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [there];\n}"
      : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(at), "r"(rank) : "memory");
  return v;
}

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
  const int* perm;
  const u16* bias;
  u16* out;
  int M, N, K, group, groups;
  int steps, tiles_m;  // of a tile, of the tokens
  int begin, end;      // units of this program: unit u is step u % steps of tile u / steps
};

// Packed words, scales and zeros of a unit. Depends on no kernel before this one.
__device__ __forceinline__ void produce_weights(const Problem& p, char* smem, int stage, int unit, u32 full) {
  if (threadIdx.x % 32 != 0) return;
  const int tile = unit / p.steps, step = unit - tile * p.steps, row_tile = tile / p.tiles_m * TILES;
  const int rows = min(ROWS, p.N - row_tile * 64), tiles = (rows + 63) / 64;
  barrier_expect(full, tiles * 4096 + GROUPS * rows * (SCALE_BYTES + HAS_ZEROS));
  const u32 w_to = shared_address(smem + W_AT + stage * W_BYTES);
  for (int i = 0; i < tiles; i++)
    copy_bulk(w_to + i * 4096, p.packed + ((long long)(row_tile + i) * p.steps + step) * 4096, 4096, full);
#pragma unroll
  for (int g = 0; g < GROUPS; g++) {
    const int group = min((step * 128 + g * (128 / GROUPS)) / p.group, p.groups - 1);
    const long long at = (long long)group * p.N + row_tile * 64;
    copy_bulk(shared_address(smem + S_AT + stage * S_BYTES + g * ROWS * SCALE_BYTES), p.scales + at * SCALE_BYTES,
              rows * SCALE_BYTES, full);
    if (HAS_ZEROS) copy_bulk(shared_address(smem + Z_AT + stage * Z_BYTES + g * ROWS), p.zeros + at, rows, full);
  }
}

// Activations of a unit: two halves of 64 channels, rows of 128 bytes whose 16-byte pieces are swizzled by the row.
__device__ __forceinline__ void produce_x(const Problem& p, char* smem, int stage, int unit, u32 full) {
  const int tile = unit / p.steps, step = unit - tile * p.steps, m0 = tile % p.tiles_m * BM;
  const int lane = threadIdx.x % 32, chunk = lane % 16, k = step * 128 + chunk * 8;
  char* x_to = smem + stage * X_BYTES + chunk / 8 * (BM * 128);
#if HAS_PERM
  int from[8] = {0, 0, 0, 0, 0, 0, 0, 0};
  if (k < p.K) {
    *(int4*)from = *(const int4*)(p.perm + k);
    *(int4*)(from + 4) = *(const int4*)(p.perm + k + 4);
  }
#pragma unroll 4
  for (int r = lane / 16; r < BM; r += 2) {
    u32 v[4] = {0, 0, 0, 0};
    if (k < p.K && m0 + r < p.M) {
      const u16* row = p.x + (long long)(m0 + r) * p.K;
#pragma unroll
      for (int i = 0; i < 4; i++) v[i] = row[from[2 * i]] | (u32)row[from[2 * i + 1]] << 16;
    }
    *(uint4*)(x_to + r * 128 + ((chunk % 8) ^ (r % 8)) * 16) = make_uint4(v[0], v[1], v[2], v[3]);
  }
  barrier_arrive(full);
#else
#pragma unroll 4
  for (int r = lane / 16; r < BM; r += 2) {
    const bool live = k < p.K && m0 + r < p.M;
    const u16* from = p.x + (live ? (long long)(m0 + r) * p.K + k : 0);
    const u32 to = shared_address(x_to + r * 128 + ((chunk % 8) ^ (r % 8)) * 16);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(live ? 16 : 0) : "memory");
  }
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(full) : "memory");
#endif
}

// A warp makes every fourth unit.
__device__ __forceinline__ void produce(const Problem& p, char* smem, u32 full, u32 empty) {
  const int first = p.begin + threadIdx.x % 128 / 32;
  for (int u = first; u < min(p.end, p.begin + STAGES); u += 4)
    produce_weights(p, smem, u - p.begin, u, full + 8 * (u - p.begin));
  wait_for_kernel_before();
  for (int u = first; u < p.end; u += 4) {
    const int i = u - p.begin, stage = i % STAGES;
    if (i >= STAGES) {
      barrier_wait(empty + 8 * stage, (i / STAGES - 1) & 1);
      __syncwarp();
      produce_weights(p, smem, stage, u, full + 8 * stage);
    }
    produce_x(p, smem, stage, u, full + 8 * stage);
  }
}

// Slice j of the words of a row pair -> its 32 channels as two left operands, centred.
__device__ __forceinline__ void unpack(u32 (&a)[8], const uint4& top, const uint4& bottom, int j, u32 zero_top,
                                       u32 zero_bottom) {
  const u32 words[8] = {top.x, bottom.x, top.y, bottom.y, top.z, bottom.z, top.w, bottom.w};
#pragma unroll
  for (int i = 0; i < 8; i++) {
    u32 field = words[i] >> (4 * j);
    asm("lop3.b32 %0, %0, %1, %2, 0xEA;" : "+r"(field) : "n"(0x000F000F), "r"(MAGIC));
    a[i] = sub2(field, i % 2 ? zero_bottom : zero_top);
  }
}

__device__ __forceinline__ u32 zero_pair(const char* smem, int stage, int g, int row) {
  if (!HAS_ZEROS) return MAGIC | MIDDLE * 0x00010001u;
  return ((const u8*)smem + Z_AT + stage * Z_BYTES + g * ROWS)[row] * 0x00010001u | MAGIC;
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
    const float v0 = (h ? v.z : v.x) + b, v1 = (h ? v.w : v.y) + b;
    const float other = __shfl_xor_sync(~0u, odd ? v0 : v1, 4);
    const u32 word = odd ? pack2(other, v1) : pack2(v0, other);
    if (m < M && row < N) *(u32*)(out + (long long)m * N + (row & ~1)) = word;
  }
}

#define SET_REGISTERS(direction, count) \
  if (count) asm volatile("setmaxnreg." direction ".sync.aligned.u32 %0;" ::"n"(count ? count : 24))

__device__ __forceinline__ void begin_barriers(u32 full, u32 empty) {
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; i++) {
      barrier_init(full + 8 * i, 33);  // the lanes of a producer, and the bytes
      barrier_init(empty + 8 * i, 4 * WARPGROUPS);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
