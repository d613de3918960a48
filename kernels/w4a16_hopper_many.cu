// Many tokens: `wgmma` with the left operand in registers (32 cycles to load it, then one for two tokens). The units of
// all tiles are dealt out evenly; of the programs that share a tile the last one to finish adds the parts. Locks are zero
// before and after a launch. With EXACT group scales multiply fp32 sums, else the weights, rounded to 16 bits.
__device__ int first_unit(int program, int units) { return (int)((long long)units * program / gridDim.x); }
__device__ int owner(int unit, int units) { return (int)(((long long)(unit + 1) * gridDim.x - 1) / units); }

template <int PENDING> __device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
__device__ __forceinline__ void wgmma(float (&d)[BM / 2], u32 a0, u32 a1, u32 a2, u32 a3, u64 b, int accumulate) WGMMA

// Adds the parts of a tile, [output][token] in fragments of a warpgroup: true for the program that holds the sum then.
__device__ __forceinline__ bool add_parts(const Problem& p, int units, int tile, int k_begin, float (&acc)[SUB][BM / 2],
                                          float* partial, int* lock, int* arrived) {
  constexpr int PIECE = SUB * 64 * BM;
  const int warpgroup = threadIdx.x / 128, thread = threadIdx.x % 128;
  float4* to = (float4*)(partial + ((long long)(blockIdx.x * 2 + (k_begin == 0)) * WARPGROUPS + warpgroup) * PIECE);
#pragma unroll
  for (int s = 0; s < SUB; s++)
#pragma unroll
    for (int i = 0; i < BM / 8; i++)
      __stcg(to + thread + (s * (BM / 8) + i) * 128,
             make_float4(acc[s][4 * i], acc[s][4 * i + 1], acc[s][4 * i + 2], acc[s][4 * i + 3]));
  const int from = owner(tile * p.steps, units), until = owner((tile + 1) * p.steps - 1, units);
  __threadfence();
  asm volatile("bar.sync %0, 128;" ::"r"(1 + warpgroup) : "memory");
  if (thread == 0) arrived[warpgroup] = atomicAdd(lock, 1);
  asm volatile("bar.sync %0, 128;" ::"r"(1 + warpgroup) : "memory");
  if (arrived[warpgroup] != until - from) return false;
  __threadfence();
  if (thread == 0) *lock = 0;
#pragma unroll
  for (int s = 0; s < SUB; s++)
#pragma unroll
    for (int i = 0; i < BM / 2; i++) acc[s][i] = 0.0f;
  for (int program = from; program <= until; program++) {  // in this order, whoever is last
    const float4* piece =
        (const float4*)(partial + ((long long)(program * 2 + (program == from)) * WARPGROUPS + warpgroup) * PIECE);
#pragma unroll
    for (int s = 0; s < SUB; s++)
#pragma unroll
      for (int i = 0; i < BM / 8; i++) {
        const float4 v = __ldcg(piece + thread + (s * (BM / 8) + i) * 128);
        acc[s][4 * i] += v.x;
        acc[s][4 * i + 1] += v.y;
        acc[s][4 * i + 2] += v.z;
        acc[s][4 * i + 3] += v.w;
      }
  }
  return true;
}

__device__ __forceinline__ void multiply(const Problem& p, char* smem, u32 full, u32 empty, int units, float* partial,
                                         int* locks, int* arrived) {
  wait_for_kernel_before();
  const int warpgroup = threadIdx.x / 128, lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  float acc[SUB][BM / 2];
#if EXACT
  float part[SUB][BM / 2];
#endif
  u32 a[2][SUB][8];
  int stage = 0, parity = 0;
  for (int u = p.begin; u < p.end;) {
    const int tile = u / p.steps, k_begin = u - tile * p.steps, k_end = min(p.steps, k_begin + p.end - u);
#pragma unroll
    for (int s = 0; s < SUB; s++)
#pragma unroll
      for (int i = 0; i < BM / 2; i++) acc[s][i] = 0.0f;
    for (int step = k_begin; step < k_end; step++) {
      barrier_wait(full + 8 * stage, parity);
      fence_async();  // wgmma reads what ordinary copies have written
      const u32 x_at = shared_address(smem + stage * X_BYTES);
      // rows of 128 bytes, swizzled; 8 rows are 1024 bytes
      const u64 b = (u64)((x_at & 0x3FFFF) >> 4) | (u64)1 << 16 | (u64)64 << 32 | (u64)1 << 62;
      uint4 top[SUB], bottom[SUB];
#pragma unroll
      for (int s = 0; s < SUB; s++) {
        const uint4* words = (const uint4*)(smem + W_AT + stage * W_BYTES + (warpgroup * SUB + s) * 4096) + warp * 64;
        top[s] = words[lane];
        bottom[s] = words[32 + lane];
      }
      u32 zero_top[SUB], zero_bottom[SUB], scale_top[SUB], scale_bottom[SUB];  // scales: fp32 bits if EXACT, else pairs
#pragma unroll
      for (int j = 0; j < 4; j++) {
        constexpr int SLICES = 4 / GROUPS;
#pragma unroll
        for (int s = 0; s < SUB; s++) {
          const int g = j / SLICES, row = (warpgroup * SUB + s) * 64 + warp * 16 + lane / 4;
          if (j % SLICES == 0) {
            const char* scale_at = smem + S_AT + stage * S_BYTES + g * ROWS * SCALE_BYTES;
            const float f = load_scale(scale_at, row), h = load_scale(scale_at, row + 8);
            scale_top[s] = EXACT ? __float_as_uint(f) : pack2(f, f);
            scale_bottom[s] = EXACT ? __float_as_uint(h) : pack2(h, h);
            zero_top[s] = zero_pair(smem, stage, g, row);
            zero_bottom[s] = zero_pair(smem, stage, g, row + 8);
          }
          wgmma_wait<2 * SUB - 1>();  // the operand that is written next has been read
          u32 (&w)[8] = a[j % 2][s];
          unpack(w, top[s], bottom[s], j, zero_top[s], zero_bottom[s]);
          const u64 at = b + j / 2 * (BM * 128 / 16) + j % 2 * 4;
#if EXACT
          asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
          wgmma(part[s], w[0], w[1], w[2], w[3], at, j % SLICES != 0);
          wgmma(part[s], w[4], w[5], w[6], w[7], at + 2, 1);
#else
#pragma unroll
          for (int i = 0; i < 8; i++) w[i] = mul2(w[i], i % 2 ? scale_bottom[s] : scale_top[s]);
          asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
          wgmma(acc[s], w[0], w[1], w[2], w[3], at, 1);
          wgmma(acc[s], w[4], w[5], w[6], w[7], at + 2, 1);
#endif
          asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        }
#if EXACT
        if (j % SLICES == SLICES - 1) {
          wgmma_wait<0>();
#pragma unroll
          for (int s = 0; s < SUB; s++) {
            const float f = __uint_as_float(scale_top[s]), h = __uint_as_float(scale_bottom[s]);
#pragma unroll
            for (int i = 0; i < BM / 8; i++) {
              acc[s][4 * i] += part[s][4 * i] * f;
              acc[s][4 * i + 1] += part[s][4 * i + 1] * f;
              acc[s][4 * i + 2] += part[s][4 * i + 2] * h;
              acc[s][4 * i + 3] += part[s][4 * i + 3] * h;
            }
          }
        }
#else
        if (j == 1 && step > k_begin && lane == 0)  // the step before is complete
          barrier_arrive(empty + 8 * (stage == 0 ? STAGES - 1 : stage - 1));
#endif
      }
#if EXACT
      if (lane == 0) barrier_arrive(empty + 8 * stage);
#endif
      if (++stage == STAGES) {
        stage = 0;
        parity ^= 1;
      }
    }
#if !EXACT
    wgmma_wait<0>();
    if (lane == 0) barrier_arrive(empty + 8 * (stage == 0 ? STAGES - 1 : stage - 1));
#endif
    const int row_tile = tile / p.tiles_m * TILES + warpgroup * SUB, m0 = tile % p.tiles_m * BM;
    bool mine = k_begin == 0 && k_end == p.steps;
    if (!mine && row_tile * 64 < p.N)
      mine = add_parts(p, units, tile, k_begin, acc, partial, locks + row_tile * p.tiles_m + tile % p.tiles_m, arrived);
    if (mine)
#pragma unroll
      for (int s = 0; s < SUB; s++)
#pragma unroll
        for (int i = 0; i < BM / 8; i++)
          store_block(make_float4(acc[s][4 * i], acc[s][4 * i + 1], acc[s][4 * i + 2], acc[s][4 * i + 3]), p.bias,
                      p.out, m0 + 8 * i, (row_tile + s) * 64 + warp * 16, p.M, p.N);
    u += k_end - k_begin;
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    w4a16_hopper(const u16* x, const char* packed, const char* scales, const u8* zeros, const int* perm,
                 const u16* bias, u16* out, float* partial, int* locks, int M, int N, int K, int group, int groups) {
  extern __shared__ __align__(1024) char smem[];
  const int tiles_m = (M + BM - 1) / BM, steps = (K + 127) / 128;
  __shared__ int arrived[WARPGROUPS];
  const int units = (N + ROWS - 1) / ROWS * tiles_m * steps;
  const int begin = first_unit(blockIdx.x, units), end = first_unit(blockIdx.x + 1, units);
  const Problem p{x, packed, scales, zeros, perm, bias, out, M, N, K, group, groups, steps, tiles_m, begin, end};
  const u32 full = shared_address(smem + BAR_AT), empty = full + 8 * STAGES;
  begin_barriers(full, empty);
  if (threadIdx.x >= MULTIPLIERS) {
    SET_REGISTERS("dec", PRODUCE_REGISTERS);
    produce(p, smem, full, empty);
  } else {
    SET_REGISTERS("inc", REGISTERS);
    multiply(p, smem, full, empty, units, partial, locks, arrived);
  }
}
