// Few tokens: `mma.sync`, whose cost falls with the tokens where a `wgmma` takes 32 cycles for 8 of them. Group scales
// multiply fp32 sums.

static_assert(STAGES >= 4, "four producers take turns: with fewer stages one could take a phase for the next");

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

// Activations of a unit: two halves of 64 channels, rows of 128 bytes whose 16-byte pieces are swizzled by the row.
__device__ __forceinline__ void produce_x(const Problem& p, char* smem, int stage, int unit, u32 full) {
  const int tile = unit / p.steps, step = unit - tile * p.steps, m0 = tile % p.tiles_m * BM;
  const int lane = threadIdx.x % 32, chunk = lane % 16, k = step * 128 + chunk * 8;
  char* x_to = smem + stage * X_BYTES + chunk / 8 * (BM * 128);
#pragma unroll 4
  for (int r = lane / 16; r < BM; r += 2) {
    const bool live = k < p.K && m0 + r < p.M;
    const u16* from = p.x + (live ? (long long)(m0 + r) * p.K + k : 0);
    const u32 to = shared_address(x_to + r * 128 + ((chunk % 8) ^ (r % 8)) * 16);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(live ? 16 : 0) : "memory");
  }
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(full) : "memory");
}

// A warp makes every fourth unit.
__device__ __forceinline__ void produce(const Problem& p, char* smem, u32 full, u32 empty) {
  const int first = p.begin + threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
  for (int u = first; u < min(p.end, p.begin + STAGES); u += 4)
    if (lane == 0) produce_weights(p, smem, u - p.begin, u, full + 8 * (u - p.begin), 0);
  wait_for_kernel_before();
  for (int u = first; u < p.end; u += 4) {
    const int i = u - p.begin, stage = i % STAGES;
    if (i >= STAGES) {
      barrier_wait(empty + 8 * stage, (i / STAGES - 1) & 1);
      __syncwarp();
      if (lane == 0) produce_weights(p, smem, stage, u, full + 8 * stage, 0);
    }
    produce_x(p, smem, stage, u, full + 8 * stage);
  }
}

__device__ __forceinline__ void multiply(const Problem& p, char* smem, u32 full, u32 empty) {
  const int warpgroup = threadIdx.x / 128, lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  float acc[SUB][BM / 2];
  const u32 words_at = shared_address(smem + W_AT) + warpgroup * SUB * 4096 + warp * 1024 + lane * 16;
  const u32 x_row = shared_address(smem) + lane % 8 * 128;
  int stage = 0, parity = 0;
  for (int u = p.begin; u < p.end;) {
    const int tile = u / p.steps, k_begin = u - tile * p.steps, k_end = min(p.steps, k_begin + p.end - u);
#pragma unroll
    for (int s = 0; s < SUB; s++)
#pragma unroll
      for (int i = 0; i < BM / 2; i++) acc[s][i] = 0.0f;
    for (int step = k_begin; step < k_end; step++) {
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
              acc[s][4 * n] += part[s][n][0] * scale_top[s];
              acc[s][4 * n + 1] += part[s][n][1] * scale_top[s];
              acc[s][4 * n + 2] += part[s][n][2] * scale_bottom[s];
              acc[s][4 * n + 3] += part[s][n][3] * scale_bottom[s];
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
    end_tile(p, tile, k_begin, acc);
    u += k_end - k_begin;
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    w4a16_hopper(const u16* x, const char* packed, const char* scales, const u8* zeros, const u16* bias, u16* out,
                 float4* partial, int* counters, int M, int N, int K, int group, int groups) {
  extern __shared__ __align__(1024) char smem[];
  const int tiles_m = (M + BM - 1) / BM, steps = (K + 127) / 128;
  const int units = (N + ROWS - 1) / ROWS * tiles_m * steps;
  const Problem p{x,     packed, scales, zeros, bias,  out,
                  M,     N,      K,       group, groups,  steps, tiles_m,
                  units, first_unit(blockIdx.x, units), first_unit(blockIdx.x + 1, units), partial, counters};
  const u32 full = shared_address(smem + BAR_AT), empty = full + 8 * STAGES;
  begin_barriers(full, empty, 33);  // the lanes of a producer, and the bytes
  if (threadIdx.x >= MULTIPLIERS) {
    SET_REGISTERS("dec", PRODUCE_REGISTERS);
    produce(p, smem, full, empty);
  } else {
    SET_REGISTERS("inc", REGISTERS);
    multiply(p, smem, full, empty);
  }
}
