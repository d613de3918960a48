// Few tokens: `mma.sync`, whose cost falls with the tokens where a `wgmma` takes 32 cycles for 8 of them. Group scales
// multiply fp32 sums. The programs of a cluster share the channels of one tile and add through distributed memory.
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

__device__ __forceinline__ void multiply(const Problem& p, char* smem, u32 full, u32 empty) {
  const int warpgroup = threadIdx.x / 128, lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const int steps = p.end - p.begin;
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
  const int tile = blockIdx.x / SPLIT, m0 = tile % p.tiles_m * BM, row0 = tile / p.tiles_m * ROWS + warp * 16;
#if SPLIT == 1
#pragma unroll
  for (int s = 0; s < SUB; s++)
#pragma unroll
    for (int n = 0; n < BM / 8; n++)
      store_block(make_float4(acc[s][n][0], acc[s][n][1], acc[s][n][2], acc[s][n][3]), p.bias, p.out, m0 + n * 8,
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
    store_block(sum, p.bias, p.out, m0 + block % (BM / 8) * 8, row0 + block / (BM / 8) * 64, p.M, p.N);
  }
  cluster_sync();  // nobody leaves while others read
#endif
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    w4a16_hopper(const u16* x, const char* packed, const char* scales, const u8* zeros, const int* perm,
                 const u16* bias, u16* out, float* partial, int* locks, int M, int N, int K, int group, int groups) {
  extern __shared__ __align__(1024) char smem[];
  const int tiles_m = (M + BM - 1) / BM, steps = (K + 127) / 128;
  const int tile = blockIdx.x / SPLIT, rank = blockIdx.x % SPLIT;
  const int begin = tile * steps + steps * rank / SPLIT, end = tile * steps + steps * (rank + 1) / SPLIT;
  const Problem p{x, packed, scales, zeros, perm, bias, out, M, N, K, group, groups, steps, tiles_m, begin, end};
  const u32 full = shared_address(smem + BAR_AT), empty = full + 8 * STAGES;
  begin_barriers(full, empty);
  if (threadIdx.x >= MULTIPLIERS) {
    SET_REGISTERS("dec", PRODUCE_REGISTERS);
    produce(p, smem, full, empty);
    meet_the_cluster();
  } else {
    SET_REGISTERS("inc", REGISTERS);
    multiply(p, smem, full, empty);
  }
}
