// Few tokens: `mma.sync`, whose cost falls with the tokens where a `wgmma` takes 32 cycles for 8 of them. Group scales
// multiply fp32 sums.
//
// The programs of two kernels fit one multiprocessor: those of the next one bring their first weights while these add
// and store. One thread brings weights, one warp activations; they walk over units without dividing (one producer with
// integer divisions cost 0.58 us a unit, more than a unit's bytes).
constexpr int THREADS = MULTIPLIERS + 64;

// A nibble in the low bits of a 16-bit float is a subnormal number, the code times 2^-133 (bf16) or 2^-24 (fp16), and
// one in the next four bits 16 times that, also where they are normal. So two slices need no shift, the others one
// between them, and one multiplication and addition centres them. Centred they are 2^-6 or 2^-9 of what they should be.
constexpr u32 EVEN = HALF ? 0x78007800u : 0x7F007F00u;  // 2^15, 2^127
constexpr u32 ODD = HALF ? 0x68006800u : 0x7D007D00u;   // a 16th
constexpr u32 MINUS_EVEN = EVEN | 0x80008000u;
constexpr float UNIT = HALF ? 512.0f : 64.0f;

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

// Of interleaved rows a piece of 16 bytes is a channel's of eight tokens. They stay as they lie, without a swizzle.
__device__ __forceinline__ void bring_interleaved(const Problem& p, u32 to, int eight, int channel) {
#pragma unroll
  for (int i = 0; i < BM / 2; i++) {
    const int k = channel + i % 4 * 32 + threadIdx.x % 32, at = eight + i / 4;
    const bool live = k < p.K && at * 8 < p.M;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to + i * 512 + threadIdx.x % 32 * 16),
                 "l"(live ? p.x + ((long long)at * p.K + k) * 8 : p.x), "r"(live ? 16 : 0) : "memory");
  }
}

// One warp: activations, of a unit two halves of 64 channels, rows of 128 bytes whose 16-byte pieces are swizzled by
// the row.
__device__ __forceinline__ void produce_x(const Problem& p, char* smem, u32 full, u32 empty) {
  const int lane = threadIdx.x % 32, chunk = lane % 16, row = lane / 16;
  const u32 to = shared_address(smem) + chunk / 8 * (BM * 128);
  int tile = p.begin / p.steps, step = p.begin - tile * p.steps, m0 = tile % p.tiles_m * BM;
  int stage = 0, parity = 1;
  wait_for_kernel_before();
  for (int u = p.begin; u < p.end; u++) {
    if (u >= p.begin + STAGES) barrier_wait(empty + 8 * stage, parity);
    const int k = step * 128 + chunk * 8;
    const u16* x = p.x + (long long)(m0 + row) * p.K + k;
#pragma unroll
    for (int i = 0; i < (X_INTERLEAVED ? 0 : BM / 2); i++) {
      const int r = row + 2 * i;
      const bool live = k < p.K && m0 + r < p.M;
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to + stage * X_BYTES + r * 128 +
                                                                         ((chunk % 8) ^ (r % 8)) * 16),
                   "l"(live ? x + (long long)2 * i * p.K : p.x), "r"(live ? 16 : 0) : "memory");
    }
    if (X_INTERLEAVED) bring_interleaved(p, shared_address(smem) + stage * X_BYTES, m0 / 8, step * 128);
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(full + 8 * stage) : "memory");
    if (++step == p.steps) {
      step = 0;
      m0 = ++tile % p.tiles_m * BM;
    }
    if (++stage == STAGES) {
      stage = 0;
      parity ^= 1;
    }
  }
}

// Slice j of the words of a row pair, centred.
__device__ __forceinline__ void centred(u32 (&a)[8], const uint4& top, const uint4& bottom, int j, u32 minus_top,
                                        u32 minus_bottom) {
  const u32 words[8] = {top.x, bottom.x, top.y, bottom.y, top.z, bottom.z, top.w, bottom.w};
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const u32 field = (j < 2 ? words[i] : words[i] >> 8) & (j % 2 ? 0x00F000F0u : 0x000F000Fu);
    a[i] = fma2(field, j % 2 ? ODD : EVEN, i % 2 ? minus_bottom : minus_top);
  }
}

__device__ __forceinline__ u32 minus_zero(const char* smem, int stage, int g, int row) {
  const u32 code = HAS_ZEROS ? ((const u8*)smem + Z_AT + stage * Z_BYTES + g * ROWS)[row] : MIDDLE;
  return mul2(code * 0x00010001u, MINUS_EVEN);
}

// Block `s` of a warpgroup behind its first one: those of gate, then as many of up.
__device__ __forceinline__ constexpr int block_at(int s) {
  return s % (SUB / PARTS) + s / (SUB / PARTS) * (TILES / PARTS);
}

__device__ __forceinline__ void multiply_unit(const char* smem, int stage, float (&acc)[SUB][BM / 2]) {
  constexpr int SLICES = 4 / GROUPS;
  const int warpgroup = threadIdx.x / 128, lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const int first_block = warpgroup * (SUB / PARTS);
  const u32 words_at = shared_address(smem + W_AT + stage * W_BYTES) + first_block * 4096 + warp * 1024 + lane * 16;
  const u32 x_row = shared_address(smem + stage * X_BYTES) + (X_INTERLEAVED ? lane * 16 : lane % 8 * 128);
  uint4 top[SUB], bottom[SUB];
#pragma unroll
  for (int s = 0; s < SUB; s++) {
    top[s] = load_shared(words_at + block_at(s) * 4096);
    bottom[s] = load_shared(words_at + block_at(s) * 4096 + 512);
  }
  float part[SUB][BM / 8][4], scale_top[SUB], scale_bottom[SUB];
  u32 minus_top[SUB], minus_bottom[SUB];
#pragma unroll
  for (int j = 0; j < 4; j++) {
    u32 b[BM / 8][4];
#pragma unroll
    for (int n = 0; n < BM / 8; n++) {
      const u32 piece = (j % 2 * 4 + lane / 8) ^ (lane % 8);
      if (X_INTERLEAVED)
        load_transposed(b[n], x_row + n * 2048 + j * 512);
      else
        load_matrices(b[n], x_row + j / 2 * (BM * 128) + n * 1024 + piece * 16);
    }
#pragma unroll
    for (int s = 0; s < SUB; s++) {
      const int g = j / SLICES, row = (first_block + block_at(s)) * 64 + warp * 16 + lane / 4;
      if (j % SLICES == 0) {
        const char* scale_at = smem + S_AT + stage * S_BYTES + g * ROWS * SCALE_BYTES;
        scale_top[s] = load_scale(scale_at, row) * UNIT;
        scale_bottom[s] = load_scale(scale_at, row + 8) * UNIT;
        minus_top[s] = minus_zero(smem, stage, g, row);
        minus_bottom[s] = minus_zero(smem, stage, g, row + 8);
      }
      u32 a[8];
      centred(a, top[s], bottom[s], j, minus_top[s], minus_bottom[s]);
#pragma unroll
      for (int n = 0; n < BM / 8; n++) {
        mma(part[s][n], a, b[n][0], b[n][1], j % SLICES != 0);
        mma(part[s][n], a + 4, b[n][2], b[n][3], true);
        if (j % SLICES == SLICES - 1)
#pragma unroll
          for (int i = 0; i < 4; i++) acc[s][4 * n + i] += part[s][n][i] * (i / 2 ? scale_bottom[s] : scale_top[s]);
      }
    }
  }
}

constexpr int TOKENS = (BM + WARPS - 1) / WARPS;  // whose norms a warp finishes

// Of what the norm before this product left to it a lane's share, while the first activations are on their way.
__device__ __forceinline__ void load_squares(const Problem& p, float (&sums)[TOKENS]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  wait_for_kernel_before();
#pragma unroll
  for (int j = 0; j < TOKENS; j++) sums[j] = 0;
  for (int first = lane; first < p.K / 64; first += 128) {
    float4 v[TOKENS][4];  // all on their way at once
#pragma unroll
    for (int i = 0; i < 4 * TOKENS; i++) {
      const int token = warp + i / 4 * WARPS, at = first + i % 4 * 32;
      v[i / 4][i % 4] = token < p.M && at < p.K / 64 ? __ldcg((const float4*)(p.squares + token * (p.K / 16)) + at)
                                                     : make_float4(0, 0, 0, 0);
    }
#pragma unroll
    for (int i = 0; i < 4 * TOKENS; i++)
      sums[i / 4] += (v[i / 4][i % 4].x + v[i / 4][i % 4].y) + (v[i / 4][i % 4].z + v[i / 4][i % 4].w);
  }
}

// When all is multiplied: nobody waits for a factor before that.
__device__ __forceinline__ void make_factors(const Problem& p, float* factors, float (&sums)[TOKENS]) {
#pragma unroll
  for (int j = 0; j < TOKENS; j++) {
    const int token = threadIdx.x / 32 + j * WARPS;
#pragma unroll
    for (int i = 1; i < 32; i *= 2) sums[j] += __shfl_xor_sync(~0u, sums[j], i);
    if (threadIdx.x % 32 == 0 && token < p.M) factors[token] = rsqrtf(sums[j] / p.K + EPS);
  }
  asm volatile("bar.sync 4, %0;" ::"n"(MULTIPLIERS) : "memory");
}

__device__ __forceinline__ void multiply(const Problem& p, char* smem, u32 full, u32 empty) {
  float acc[SUB][BM / 2];
  int stage = 0, parity = 0;
  float sums[TOKENS];
  if (NORMED) load_squares(p, sums);
  for (int u = p.begin; u < p.end;) {
    const int tile = u / p.steps, k_begin = u - tile * p.steps, k_end = min(p.steps, k_begin + p.end - u);
#pragma unroll
    for (int s = 0; s < SUB; s++)
#pragma unroll
      for (int i = 0; i < BM / 2; i++) acc[s][i] = 0.0f;
    for (int step = k_begin; step < k_end; step++) {
      barrier_wait(full + 8 * stage, parity);
      multiply_unit(smem, stage, acc);
      __syncwarp();
      if (threadIdx.x % 32 == 0) barrier_arrive(empty + 8 * stage);
      if (++stage == STAGES) {
        stage = 0;
        parity ^= 1;
      }
    }
    wait_for_kernel_before();
    if (NORMED && u == p.begin) make_factors(p, (float*)(smem + FACTORS_AT), sums);
    if (CLUSTER > 1)
      sum_cluster(p, tile, smem, acc);
    else
      sum_tile(p, tile, k_begin, smem, acc);
    u += k_end - k_begin;
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
    w4a16_hopper(const u16* x, const char* packed, const char* scales, const u8* zeros, const u16* bias, u16* out,
                 float4* partial, int* counters, const float* squares, const u16* residual, const u16* norm, u16* rows,
                 float* new_squares, const int* places, int M, int N, int K, int group, int groups) {
  extern __shared__ __align__(1024) char smem[];
  const int tiles_m = (M + BM - 1) / BM, steps = (K + 127) / 128;
  const int units = (N + ROWS - 1) / ROWS * tiles_m * steps;
  const Problem p{
      x, packed, scales, zeros, bias, out, M, N, K, group, groups,
      steps, tiles_m, units, first_unit(blockIdx.x, units), first_unit(blockIdx.x + 1, units),
      partial, counters, squares, residual, norm, rows, new_squares, places};
  const u32 full = shared_address(smem + BAR_AT), empty = full + 8 * STAGES;
  begin_barriers(full, empty, 33);  // the lanes that bring activations, and the bytes
  if (CLUSTER > 1) asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
  if (threadIdx.x < MULTIPLIERS) {
    multiply(p, smem, full, empty);
    return;
  }
  if (threadIdx.x >= MULTIPLIERS + 32)
    produce_x(p, smem, full, empty);
  else if (threadIdx.x == MULTIPLIERS)
    produce_weights(p, smem, full, empty);
  pass_cluster();
}
