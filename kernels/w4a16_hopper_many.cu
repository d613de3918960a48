// Many tokens: `wgmma` with the left operand in registers. A warpgroup unpacks a part of a step and multiplies it in one
// burst of products while the others unpack. A product whose operand is in registers holds its warp up until the matrix
// unit takes it; where each was followed by unpacking the next operand, warps fell in step and the unit idled for a third
// of the time and more. Scales multiply the weights, rounded to 16 bits.
struct alignas(64) TensorMap {
  u64 words[16];
};

template <int PENDING> __device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
__device__ __forceinline__ void wgmma(float (&d)[BM / 2], const u32* a, u64 b) WGMMA

// 64 channels of BM tokens in rows of 128 bytes, swizzled; zeros beyond the tensor.
__device__ __forceinline__ void copy_box(u32 to, const TensorMap* x, int channel, int token, u32 bar) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
      ::"r"(to), "l"(x), "r"(channel), "r"(token), "r"(bar) : "memory");
}

// One thread.
__device__ __forceinline__ void produce(const Problem& p, const TensorMap* x, char* smem, u32 full, u32 empty) {
  for (int u = p.begin; u < min(p.end, p.begin + STAGES); u++)
    produce_weights(p, smem, u - p.begin, u, full + 8 * (u - p.begin), X_BYTES);
  wait_for_kernel_before();
  int stage = 0, parity = 1;
  for (int u = p.begin; u < p.end; u++) {
    if (u - p.begin >= STAGES) {
      barrier_wait(empty + 8 * stage, parity);
      produce_weights(p, smem, stage, u, full + 8 * stage, X_BYTES);
    }
    const int tile = u / p.steps, channel = (u - tile * p.steps) * 128, token = tile % p.tiles_m * BM;
    const u32 to = shared_address(smem + stage * X_BYTES);
    copy_box(to, x, channel, token, full + 8 * stage);
    copy_box(to + BM * 128, x, channel + 64, token, full + 8 * stage);
    if (++stage == STAGES) {
      stage = 0;
      parity ^= 1;
    }
  }
}

__device__ __forceinline__ void multiply(const Problem& p, char* smem, u32 full, u32 empty) {
  const int warpgroup = threadIdx.x / 128, lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  constexpr int SLICES = 4 / GROUPS;
  constexpr bool AHEAD = BUFFERS == 1;  // words of the next step are loaded before the last burst of a step
  float acc[SUB][BM / 2];
  u32 a[BUFFERS][SUB][BURST / 2][8];
  uint4 top[SUB], bottom[SUB];
  u32 zero_top[SUB], zero_bottom[SUB], scale_top[SUB], scale_bottom[SUB];
  int stage = 0, parity = 0;
  const auto load_scales = [&](int g) {
#pragma unroll
    for (int s = 0; s < SUB; s++) {
      const int row = (warpgroup * SUB + s) * 64 + warp * 16 + lane / 4;
      const char* scale_at = smem + S_AT + stage * S_BYTES + g * ROWS * SCALE_BYTES;
      const float f = load_scale(scale_at, row), h = load_scale(scale_at, row + 8);
      scale_top[s] = pack2(f, f);
      scale_bottom[s] = pack2(h, h);
      zero_top[s] = zero_pair(smem, stage, g, row);
      zero_bottom[s] = zero_pair(smem, stage, g, row + 8);
    }
  };
  const auto load_words = [&]() {
    barrier_wait(full + 8 * stage, parity);
#pragma unroll
    for (int s = 0; s < SUB; s++) {
      const uint4* words = (const uint4*)(smem + W_AT + stage * W_BYTES + (warpgroup * SUB + s) * 4096) + warp * 64;
      top[s] = words[lane];
      bottom[s] = words[32 + lane];
    }
    if (GROUPS == 1) load_scales(0);
  };
  if (AHEAD) load_words();
  for (int u = p.begin; u < p.end;) {
    const int tile = u / p.steps, k_begin = u - tile * p.steps, k_end = min(p.steps, k_begin + p.end - u);
#pragma unroll
    for (int s = 0; s < SUB; s++)
#pragma unroll
      for (int i = 0; i < BM / 2; i++) acc[s][i] = 0.0f;
    for (int step = k_begin; step < k_end; step++) {
      if (!AHEAD) load_words();
      const int now = stage;
      // rows of 128 bytes, swizzled; 8 rows are 1024 bytes
      const u64 x_at = (shared_address(smem + stage * X_BYTES) & 0x3FFFF) >> 4;
      const u64 b = x_at | (u64)1 << 16 | (u64)64 << 32 | (u64)1 << 62;
#pragma unroll
      for (int c = 0; c < 8 / BURST; c++) {
        auto& w = a[c % BUFFERS];
        wgmma_wait<BUFFERS - 1>();  // the operands that are written next have been read
        if (c == BUFFERS - 1 && step > k_begin && lane == 0)
          barrier_arrive(empty + 8 * (now == 0 ? STAGES - 1 : now - 1));
#pragma unroll
        for (int i = 0; i < BURST / 2; i++)
#pragma unroll
          for (int s = 0; s < SUB; s++) {
            const int j = c * (BURST / 2) + i;
            if (s == 0 && GROUPS > 1 && j % SLICES == 0) load_scales(j / SLICES);
            unpack(w[s][i], top[s], bottom[s], j, zero_top[s], zero_bottom[s]);
#pragma unroll
            for (int q = 0; q < 8; q++) w[s][i][q] = mul2(w[s][i][q], q % 2 ? scale_bottom[s] : scale_top[s]);
          }
        if (c == 8 / BURST - 1) {
          if (++stage == STAGES) {
            stage = 0;
            parity ^= 1;
          }
          if (AHEAD && u + step - k_begin + 1 < p.end) load_words();
        }
#pragma unroll
        for (int i = 0; i < BURST / 2; i++)  // all operands are made before the first product starts
#pragma unroll
          for (int s = 0; s < SUB; s++)
#pragma unroll
            for (int q = 0; q < 8; q++) asm volatile("" : "+r"(w[s][i][q]));
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
        for (int i = 0; i < BURST / 2; i++) {
          const int j = c * (BURST / 2) + i;
          const u64 at = b + j / 2 * (BM * 128 / 16) + j % 2 * 4;
#pragma unroll
          for (int s = 0; s < SUB; s++) {
            wgmma(acc[s], w[s][i], at);
            wgmma(acc[s], w[s][i] + 4, at + 2);
          }
        }
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
      }
    }
    wgmma_wait<0>();
    if (lane == 0) barrier_arrive(empty + 8 * (stage == 0 ? STAGES - 1 : stage - 1));
    wait_for_kernel_before();
    end_tile(p, tile, k_begin, acc);
    u += k_end - k_begin;
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    w4a16_hopper(const __grid_constant__ TensorMap x, const char* packed, const char* scales, const u8* zeros,
                 const u16* bias, u16* out, float4* partial, int* counters, int M, int N, int K, int group,
                 int groups) {
  extern __shared__ __align__(1024) char smem[];
  const int tiles_m = (M + BM - 1) / BM, steps = (K + 127) / 128;
  const int units = (N + ROWS - 1) / ROWS * tiles_m * steps;
  const Problem p{nullptr, packed, scales, zeros, bias, out,
                  M,     N,      K,       group, groups,  steps, tiles_m,
                  units, first_unit(blockIdx.x, units), first_unit(blockIdx.x + 1, units), partial, counters};
  const u32 full = shared_address(smem + BAR_AT), empty = full + 8 * STAGES;
  begin_barriers(full, empty, 1);
  if (threadIdx.x >= MULTIPLIERS) {
    SET_REGISTERS("dec", PRODUCE_REGISTERS);
    if (threadIdx.x == MULTIPLIERS) produce(p, &x, smem, full, empty);
  } else {
    SET_REGISTERS("inc", REGISTERS);
    multiply(p, smem, full, empty);
  }
}
