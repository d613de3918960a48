// 4-bit weights times 16-bit activations on Hopper: out[m, n] = sum_k x[m, k] * w[n, k].
//
// Both kernels: a warpgroup of producers brings packed words (bulk copies) and activations (16-byte copies, swizzled) of
// one step, 128 channels, to a ring in shared memory; the programs of a cluster split the channels of one output tile
// and add their parts through distributed shared memory in a fixed order. Defines come from `w4a16_hopper.py`:
//   MANY            0: few tokens, mma.sync; 1: many, wgmma
//   BM              tokens of a tile        ROWS      output channels of a tile
//   STAGES          of the ring             SPLIT     programs of a cluster
//   HALF            0 bf16, 1 fp16          GROUPS    of a step (1, 2, 4)
//   HAS_ZEROS, HAS_PERM                     SCALE     0 fp16, 1 bf16, 2 fp32       MIDDLE   zero point without zeros
//   WARPGROUPS      that multiply           UNPACKERS warpgroups that unpack (MANY)
//   REGISTERS, UNPACK_REGISTERS, PRODUCE_REGISTERS    of a thread (0: not moved between warpgroups)
//   RESIDENT        programs of a multiprocessor
//   BUFFERS         of unpacked weights (MANY)        WGMMA, WGMMA_N   body of the instruction's wrapper, its outputs
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

constexpr int TILES = ROWS / 64;  // packed tiles of a step
constexpr int SCALE_BYTES = SCALE == 2 ? 4 : 2;
constexpr int X_BYTES = BM * 256;
constexpr int W_BYTES = ROWS * 64;
constexpr int S_BYTES = GROUPS * ROWS * SCALE_BYTES;
constexpr int Z_BYTES = HAS_ZEROS ? GROUPS * ROWS : 0;
constexpr int B_BYTES = ROWS * 128;  // 64 channels of unpacked weights
constexpr int B_AT = STAGES * X_BYTES;
constexpr int W_AT = B_AT + (MANY ? BUFFERS * B_BYTES : 0);
constexpr int S_AT = W_AT + STAGES * W_BYTES;
constexpr int Z_AT = S_AT + STAGES * S_BYTES;
constexpr int BAR_AT = Z_AT + STAGES * Z_BYTES;
constexpr u32 MAGIC = HALF ? 0x64006400u : 0x43004300u;  // of 1024 or 128: a code in the low bits adds its value
constexpr int MULTIPLIERS = 128 * WARPGROUPS;
constexpr int THREADS = MULTIPLIERS + 128 * (MANY ? UNPACKERS : 0) + 128;

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
  int M, N, K, group, groups;
  int row_tile, m0;         // where this program's output tile begins
  int step_begin, step_end;  // its channels, in steps
};

// Packed words, scales and zeros of a step. Depends on no kernel before this one.
__device__ __forceinline__ void produce_weights(const Problem& p, char* smem, int stage, int step, u32 full) {
  if (threadIdx.x % 32 != 0) return;
  const int steps = (p.K + 127) / 128;
  const int rows = min(ROWS, p.N - p.row_tile * 64), tiles = (rows + 63) / 64;
  barrier_expect(full, tiles * 4096 + GROUPS * rows * (SCALE_BYTES + HAS_ZEROS));
  const u32 w_to = shared_address(smem + W_AT + stage * W_BYTES);
  for (int i = 0; i < tiles; i++)
    copy_bulk(w_to + i * 4096, p.packed + ((long long)(p.row_tile + i) * steps + step) * 4096, 4096, full);
#pragma unroll
  for (int g = 0; g < GROUPS; g++) {
    const int group = min((step * 128 + g * (128 / GROUPS)) / p.group, p.groups - 1);
    const long long at = (long long)group * p.N + p.row_tile * 64;
    copy_bulk(shared_address(smem + S_AT + stage * S_BYTES + g * ROWS * SCALE_BYTES), p.scales + at * SCALE_BYTES,
              rows * SCALE_BYTES, full);
    if (HAS_ZEROS) copy_bulk(shared_address(smem + Z_AT + stage * Z_BYTES + g * ROWS), p.zeros + at, rows, full);
  }
}

// Activations of a step: two halves of 64 channels, rows of 128 bytes whose 16-byte pieces are swizzled by the row.
__device__ __forceinline__ void produce_x(const Problem& p, char* smem, int stage, int step, u32 full) {
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
    if (k < p.K && p.m0 + r < p.M) {
      const u16* row = p.x + (long long)(p.m0 + r) * p.K;
#pragma unroll
      for (int i = 0; i < 4; i++) v[i] = row[from[2 * i]] | (u32)row[from[2 * i + 1]] << 16;
    }
    *(uint4*)(x_to + r * 128 + ((chunk % 8) ^ (r % 8)) * 16) = make_uint4(v[0], v[1], v[2], v[3]);
  }
  if (MANY) fence_async();
  barrier_arrive(full);
#else
#pragma unroll 4
  for (int r = lane / 16; r < BM; r += 2) {
    const bool live = k < p.K && p.m0 + r < p.M;
    const u16* from = p.x + (live ? (long long)(p.m0 + r) * p.K + k : 0);
    const u32 to = shared_address(x_to + r * 128 + ((chunk % 8) ^ (r % 8)) * 16);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(live ? 16 : 0) : "memory");
  }
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(full) : "memory");
#endif
}

// A warp makes every fourth step.
__device__ __forceinline__ void produce(const Problem& p, char* smem, u32 full, u32 empty) {
  const int first = threadIdx.x % 128 / 32, steps = p.step_end - p.step_begin;
  for (int i = first; i < min(steps, STAGES); i += 4) produce_weights(p, smem, i, p.step_begin + i, full + 8 * i);
  wait_for_kernel_before();
  for (int i = first; i < steps; i += 4) {
    const int stage = i % STAGES;
    if (i >= STAGES) {
      barrier_wait(empty + 8 * stage, (i / STAGES - 1) & 1);
      __syncwarp();
      produce_weights(p, smem, stage, p.step_begin + i, full + 8 * stage);
    }
    produce_x(p, smem, stage, p.step_begin + i, full + 8 * stage);
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

#if !MANY
constexpr int SUB = TILES / WARPGROUPS;  // row tiles of a warpgroup

__device__ __forceinline__ void mma(float (&d)[4], const u32* a, u32 b0, u32 b1, bool accumulate) {
#if HALF
#define MMA "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"
#else
#define MMA "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
#endif
  if (accumulate)
    asm volatile(MMA " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  else
    asm volatile(MMA " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %10, %10, %10};"
                 : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(0.0f));
}

// 16 outputs by 8 tokens of a warp, [row][token]: two neighbouring rows of one token in one word.
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

__device__ __forceinline__ void multiply(const Problem& p, char* smem, u32 full, u32 empty, const u16* bias, u16* out) {
  const int warpgroup = threadIdx.x / 128, lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const int steps = p.step_end - p.step_begin;
  float acc[SUB][BM / 8][4];
#pragma unroll
  for (int s = 0; s < SUB; s++)
#pragma unroll
    for (int n = 0; n < BM / 8; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) acc[s][n][i] = 0.0f;
  const u32 words_at = shared_address(smem + W_AT) + warpgroup * SUB * 4096 + warp * 1024 + lane * 16;
  const u32 x_row = shared_address(smem) + lane % 8 * 128;
  int stage = 0, parity = 0;
  for (int i = 0; i < steps; i++) {
    barrier_wait(full + 8 * stage, parity);
    uint4 top[SUB], bottom[SUB];
#pragma unroll
    for (int s = 0; s < SUB; s++) {
      const u32 at = words_at + stage * W_BYTES + s * 4096;
      asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(top[s].x), "=r"(top[s].y), "=r"(top[s].z), "=r"(top[s].w) : "r"(at));
      asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(bottom[s].x), "=r"(bottom[s].y), "=r"(bottom[s].z), "=r"(bottom[s].w) : "r"(at + 512));
    }
    float part[SUB][BM / 8][4];
    u32 zero_top[SUB], zero_bottom[SUB];
    float scale_top[SUB], scale_bottom[SUB];
#pragma unroll
    for (int j = 0; j < 4; j++) {
      constexpr int SLICES = 4 / GROUPS;
      u32 b[BM / 8][4];
#pragma unroll
      for (int n = 0; n < BM / 8; n++) {
        const u32 at = x_row + stage * X_BYTES + j / 2 * (BM * 128) + n * 1024 +
                       (((j % 2 * 4 + lane / 8) ^ (lane % 8)) * 16);
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(b[n][0]), "=r"(b[n][1]), "=r"(b[n][2]), "=r"(b[n][3]) : "r"(at));
      }
#pragma unroll
      for (int s = 0; s < SUB; s++) {
        const int g = j / SLICES, row = (warpgroup * SUB + s) * 64 + warp * 16 + lane / 4;
        if (j % SLICES == 0) {
          const char* scale_at = smem + S_AT + stage * S_BYTES + g * ROWS * SCALE_BYTES;
          scale_top[s] = load_scale(scale_at, row);
          scale_bottom[s] = load_scale(scale_at, row + 8);
          zero_top[s] = zero_pair(smem, stage, g, row);
          zero_bottom[s] = zero_pair(smem, stage, g, row + 8);
        }
        u32 a[8];
        unpack(a, top[s], bottom[s], j, zero_top[s], zero_bottom[s]);
#pragma unroll
        for (int n = 0; n < BM / 8; n++) {
          mma(part[s][n], a, b[n][0], b[n][1], j % SLICES != 0);
          mma(part[s][n], a + 4, b[n][2], b[n][3], true);
          if (j % SLICES == SLICES - 1) {
            acc[s][n][0] += part[s][n][0] * scale_top[s];
            acc[s][n][1] += part[s][n][1] * scale_top[s];
            acc[s][n][2] += part[s][n][2] * scale_bottom[s];
            acc[s][n][3] += part[s][n][3] * scale_bottom[s];
          }
        }
      }
    }
    __syncwarp();
    if (lane == 0) barrier_arrive(empty + 8 * stage);
    if (++stage == STAGES) {
      stage = 0;
      parity ^= 1;
    }
  }
  wait_for_kernel_before();
  const int row0 = p.row_tile * 64 + warp * 16;
#if SPLIT == 1
#pragma unroll
  for (int s = 0; s < SUB; s++)
#pragma unroll
    for (int n = 0; n < BM / 8; n++)
      store_block(make_float4(acc[s][n][0], acc[s][n][1], acc[s][n][2], acc[s][n][3]), bias, out, p.m0 + n * 8,
                  row0 + (warpgroup * SUB + s) * 64, p.M, p.N);
#else
  constexpr int BLOCKS = TILES * (BM / 8);  // of 64 outputs by 8 tokens
  const u32 mine = shared_address(smem) + threadIdx.x % 128 * 16;
  asm volatile("bar.sync 1, %0;" ::"n"(MULTIPLIERS) : "memory");  // the ring has been read
#pragma unroll
  for (int s = 0; s < SUB; s++)
#pragma unroll
    for (int n = 0; n < BM / 8; n++)
      asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(
                       mine + ((warpgroup * SUB + s) * (BM / 8) + n) * 2048),
                   "f"(acc[s][n][0]), "f"(acc[s][n][1]), "f"(acc[s][n][2]), "f"(acc[s][n][3]) : "memory");
  cluster_sync();
  for (int block = blockIdx.x % SPLIT * WARPGROUPS + warpgroup; block < BLOCKS; block += SPLIT * WARPGROUPS) {
    float4 v[SPLIT], sum = make_float4(0, 0, 0, 0);
#pragma unroll
    for (int r = 0; r < SPLIT; r++) v[r] = load_remote(mine + block * 2048, r);
#pragma unroll
    for (int r = 0; r < SPLIT; r++) {
      sum.x += v[r].x;
      sum.y += v[r].y;
      sum.z += v[r].z;
      sum.w += v[r].w;
    }
    store_block(sum, bias, out, p.m0 + block % (BM / 8) * 8, row0 + block / (BM / 8) * 64, p.M, p.N);
  }
  cluster_sync();  // nobody leaves while others read
#endif
}

#else  // MANY
constexpr int SUB = BM / 64 / WARPGROUPS;  // tiles of 64 tokens of a warpgroup
constexpr int PARTS = ROWS / WGMMA_N;

template <int PENDING> __device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
__device__ __forceinline__ void wgmma(float (&d)[WGMMA_N / 2], u64 a, u64 b, int accumulate) WGMMA

// Rows of 128 bytes, swizzled; 8 rows are 1024 bytes.
__device__ __forceinline__ u64 descriptor(u32 at) {
  return (u64)((at & 0x3FFFF) >> 4) | (u64)1 << 16 | (u64)64 << 32 | (u64)1 << 62;
}

__device__ __forceinline__ void unpack_weights(const Problem& p, char* smem, u32 full, u32 empty, u32 ready, u32 spent) {
  constexpr int MINE = (TILES + UNPACKERS - 1) / UNPACKERS;
  const int unpacker = threadIdx.x / 128 - WARPGROUPS, lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const int steps = p.step_end - p.step_begin;
  const u32 row_at = shared_address(smem + B_AT) + (warp * 16 + lane % 8) * 128;
  int stage = 0, parity = 0, buffer = 0, reuse = 1;  // the first wait for a buffer passes
  for (int i = 0; i < steps; i++) {
    barrier_wait(full + 8 * stage, parity);
    uint4 top[MINE], bottom[MINE];
#pragma unroll
    for (int s = 0; s < MINE; s++) {
      const int tile = unpacker + s * UNPACKERS;
      if (tile < TILES) {
        const uint4* words = (const uint4*)(smem + W_AT + stage * W_BYTES + tile * 4096) + warp * 64;
        top[s] = words[lane];
        bottom[s] = words[32 + lane];
      }
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
      barrier_wait(spent + 8 * buffer, reuse);
#pragma unroll
      for (int s = 0; s < MINE; s++) {
        const int tile = unpacker + s * UNPACKERS, row = tile * 64 + warp * 16 + lane / 4;
        if (tile >= TILES) break;
        u32 zero_top, zero_bottom, scale_top, scale_bottom;
#pragma unroll
        for (int jj = 0; jj < 2; jj++) {
          const int j = 2 * half + jj, g = j * GROUPS / 4;
          if (jj == 0 || GROUPS == 4) {
            const char* scale_at = smem + S_AT + stage * S_BYTES + g * ROWS * SCALE_BYTES;
            const float f = load_scale(scale_at, row), h = load_scale(scale_at, row + 8);
            scale_top = pack2(f, f);
            scale_bottom = pack2(h, h);
            zero_top = zero_pair(smem, stage, g, row);
            zero_bottom = zero_pair(smem, stage, g, row + 8);
          }
          u32 a[8];
          unpack(a, top[s], bottom[s], j, zero_top, zero_bottom);
          const u32 to = row_at + buffer * B_BYTES + tile * 8192 + (((jj * 4 + lane / 8) ^ (lane % 8)) * 16);
          asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to),
                       "r"(mul2(a[0], scale_top)), "r"(mul2(a[2], scale_top)), "r"(mul2(a[4], scale_top)),
                       "r"(mul2(a[6], scale_top)) : "memory");
          asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to + 1024),
                       "r"(mul2(a[1], scale_bottom)), "r"(mul2(a[3], scale_bottom)), "r"(mul2(a[5], scale_bottom)),
                       "r"(mul2(a[7], scale_bottom)) : "memory");
        }
      }
      fence_async();
      __syncwarp();
      if (lane == 0) barrier_arrive(ready + 8 * buffer);
      if (++buffer == BUFFERS) {
        buffer = 0;
        reuse ^= 1;
      }
    }
    if (lane == 0) barrier_arrive(empty + 8 * stage);
    if (++stage == STAGES) {
      stage = 0;
      parity ^= 1;
    }
  }
}

__device__ __forceinline__ float4 quad(const float (&d)[WGMMA_N / 2], int at) {
  return make_float4(d[at], d[at + 1], d[at + 2], d[at + 3]);
}

// 64 tokens by 8 outputs of a warpgroup, [token][output].
__device__ __forceinline__ void store_block(float4 v, const u16* bias, u16* out, int m, int n, int M, int N) {
  const int lane = threadIdx.x % 32;
  m += threadIdx.x / 32 % 4 * 16 + lane / 4;
  n += 2 * (lane % 4);
  const float b0 = bias_of(bias, n, N), b1 = bias_of(bias, n + 1, N);
  if (n < N && m < M) *(u32*)(out + (long long)m * N + n) = pack2(v.x + b0, v.y + b1);
  if (n < N && m + 8 < M) *(u32*)(out + (long long)(m + 8) * N + n) = pack2(v.z + b0, v.w + b1);
}

__device__ __forceinline__ void multiply(const Problem& p, char* smem, u32 full, u32 empty, u32 ready, u32 spent,
                                         const u16* bias, u16* out) {
  const int warpgroup = threadIdx.x / 128, lane = threadIdx.x % 32;
  const int steps = p.step_end - p.step_begin;
  float acc[SUB][PARTS][WGMMA_N / 2];
#pragma unroll
  for (int s = 0; s < SUB; s++)
#pragma unroll
    for (int n = 0; n < PARTS; n++)
#pragma unroll
      for (int i = 0; i < WGMMA_N / 2; i++) acc[s][n][i] = 0.0f;
  const u64 x_first = descriptor(shared_address(smem) + warpgroup * SUB * 64 * 128);
  const u64 b_first = descriptor(shared_address(smem + B_AT));
  int stage = 0, parity = 0, buffer = 0, reuse = 0, last_buffer = 0, last_stage = 0;
  for (int i = 0; i < steps; i++) {
    barrier_wait(full + 8 * stage, parity);
    fence_async();
#pragma unroll
    for (int half = 0; half < 2; half++) {
      barrier_wait(ready + 8 * buffer, reuse);
      const u64 a = x_first + stage * (X_BYTES / 16) + half * (BM * 128 / 16), b = b_first + buffer * (B_BYTES / 16);
      asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
      for (int k = 0; k < 4; k++)
#pragma unroll
        for (int s = 0; s < SUB; s++)
#pragma unroll
          for (int n = 0; n < PARTS; n++)
            wgmma(acc[s][n], a + s * (64 * 128 / 16) + 2 * k, b + n * (WGMMA_N * 128 / 16) + 2 * k, 1);
      asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
      wgmma_wait<1>();
      if (lane == 0 && i + half > 0) {
        barrier_arrive(spent + 8 * last_buffer);
        if (half == 0) barrier_arrive(empty + 8 * last_stage);
      }
      last_buffer = buffer;
      if (++buffer == BUFFERS) {
        buffer = 0;
        reuse ^= 1;
      }
    }
    last_stage = stage;
    if (++stage == STAGES) {
      stage = 0;
      parity ^= 1;
    }
  }
  wgmma_wait<0>();
  wait_for_kernel_before();
  const int n0 = p.row_tile * 64;
#if SPLIT == 1
#pragma unroll
  for (int s = 0; s < SUB; s++)
#pragma unroll
    for (int i = 0; i < ROWS / 8; i++)
      store_block(quad(acc[s][8 * i / WGMMA_N], 8 * i % WGMMA_N / 2), bias, out, p.m0 + (warpgroup * SUB + s) * 64,
                  n0 + i * 8, p.M, p.N);
#else
  constexpr int BLOCKS = BM / 64 * (ROWS / 8);  // of 64 tokens by 8 outputs
  const u32 mine = shared_address(smem) + threadIdx.x % 128 * 16;
  asm volatile("bar.sync 1, %0;" ::"n"(MULTIPLIERS) : "memory");  // the ring has been read
#pragma unroll
  for (int s = 0; s < SUB; s++)
#pragma unroll
    for (int i = 0; i < ROWS / 8; i++) {
      const float4 v = quad(acc[s][8 * i / WGMMA_N], 8 * i % WGMMA_N / 2);
      asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(
                       mine + ((warpgroup * SUB + s) * (ROWS / 8) + i) * 2048),
                   "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w) : "memory");
    }
  cluster_sync();
  for (int block = blockIdx.x % SPLIT * WARPGROUPS + warpgroup; block < BLOCKS; block += SPLIT * WARPGROUPS) {
    const int token = block / (ROWS / 8) * 64, column = block % (ROWS / 8) * 8;
    if (p.m0 + token >= p.M) break;
    float4 v[SPLIT], sum = make_float4(0, 0, 0, 0);
#pragma unroll
    for (int r = 0; r < SPLIT; r++) v[r] = load_remote(mine + block * 2048, r);
#pragma unroll
    for (int r = 0; r < SPLIT; r++) {
      sum.x += v[r].x;
      sum.y += v[r].y;
      sum.z += v[r].z;
      sum.w += v[r].w;
    }
    store_block(sum, bias, out, p.m0 + token, n0 + column, p.M, p.N);
  }
  cluster_sync();  // nobody leaves while others read
#endif
}
#endif

#define SET_REGISTERS(direction, count) \
  if (count) asm volatile("setmaxnreg." direction ".sync.aligned.u32 %0;" ::"n"(count ? count : 24))

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
    w4a16_hopper(const u16* x, const char* packed, const char* scales, const u8* zeros, const int* perm, const u16* bias,
                 u16* out, int M, int N, int K, int group, int groups) {
  extern __shared__ __align__(1024) char smem[];
  const int tiles_m = (M + BM - 1) / BM, steps = (K + 127) / 128;
  const int tile = blockIdx.x / SPLIT, rank = blockIdx.x % SPLIT;
  const Problem p{x, packed, scales, zeros, perm, M, N, K, group, groups, tile / tiles_m * TILES, tile % tiles_m * BM,
                  steps * rank / SPLIT, steps * (rank + 1) / SPLIT};
  const u32 full = shared_address(smem + BAR_AT), empty = full + 8 * STAGES, ready = empty + 8 * STAGES;
  const u32 spent = ready + 8 * (MANY ? BUFFERS : 0);
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; i++) {
      barrier_init(full + 8 * i, 33);  // the lanes of a producer, and the bytes
      barrier_init(empty + 8 * i, 4 * (WARPGROUPS + (MANY ? UNPACKERS : 0)));
    }
#if MANY
    for (int i = 0; i < BUFFERS; i++) {
      barrier_init(ready + 8 * i, 4 * UNPACKERS);
      barrier_init(spent + 8 * i, 4 * WARPGROUPS);
    }
#endif
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  const int warpgroup = threadIdx.x / 128;
  if (warpgroup == THREADS / 128 - 1) {
    SET_REGISTERS("dec", PRODUCE_REGISTERS);
    produce(p, smem, full, empty);
    meet_the_cluster();
#if MANY
  } else if (warpgroup >= WARPGROUPS) {
#if UNPACK_UP
    SET_REGISTERS("inc", UNPACK_REGISTERS);
#else
    SET_REGISTERS("dec", UNPACK_REGISTERS);
#endif
    unpack_weights(p, smem, full, empty, ready, spent);
    meet_the_cluster();
  } else {
    SET_REGISTERS("inc", REGISTERS);
    multiply(p, smem, full, empty, ready, spent, bias, out);
#else
  } else {
    SET_REGISTERS("inc", REGISTERS);
    multiply(p, smem, full, empty, bias, out);
#endif
  }
}
