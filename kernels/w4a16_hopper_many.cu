// Many tokens: `wgmma` with the left operand in registers. A warpgroup unpacks a part of a step and multiplies it in
// one burst of products while the others unpack. A product whose operand is in registers holds its warp up until the
// matrix unit takes it; where each was followed by unpacking the next operand, warps fell in step and the unit idled
// for a third of the time and more. Scales multiply the weights, rounded to 16 bits.
constexpr int THREADS = MULTIPLIERS + 128;
constexpr u64 X_ROWS = (u64)64 << 32 | (u64)1 << 62;  // of a descriptor: swizzled rows of 128 bytes, 8 of them 1024

struct alignas(64) TensorMap {
  u64 words[16];
};

template <int PENDING> __device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
__device__ __forceinline__ void wgmma(float (&d)[BM / 2], const u32* a, u64 b) WGMMA

__device__ __forceinline__ u32 sub2(u32 a, u32 b) {
  u32 d;
  asm("sub." T2 " %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}
__device__ __forceinline__ u32 zero_of(const char* smem, int stage, int g, int row) {
  return (HAS_ZEROS ? ((const u8*)smem + Z_AT + stage * Z_BYTES + g * ROWS)[row] : MIDDLE) * 0x00010001u;
}

// What unpacks a row of a group. Codes of even slices of a word stand in bits 0..3 of its halves, of odd slices in bits
// 4..7; a shift by 8 brings the second two there.
//   bf16  Such a half alone is a subnormal number, code * 2^-133 or code * 2^-129 (numbers are evenly spaced up to
//         2^-125). Times scale * 2^85 or a sixteenth of it that is the weight * 2^-48, and sums are multiplied by 2^48.
//         Without zero points one fma centres, too, and is exact before it rounds: the middle is a power of two.
//   fp16  With a magic exponent it is 1024 + code or 1024 + 16 * code, which an fma centres.
struct Row {
  u32 even, odd, scale_even, scale_odd;
};

__device__ __forceinline__ Row row_of(float scale, u32 zero) {
#if HALF
  const u32 twice = pack2(scale, scale);
  return {0xE400E400u + zero, 0xD400D400u + (zero << 4), twice, twice};
#else
  const u32 twice = pack2(scale * 0x1p85f, scale * 0x1p85f), sixteenth = mul2(twice, 0x3D803D80u);
  if (HAS_ZEROS) return {zero, mul2(zero, 0x41804180u), twice, sixteenth};
  const u32 centre = mul2(twice, MIDDLE * 0x00010001u | 0x80008000u);
  return {centre, centre, twice, sixteenth};
#endif
}

// Slice j of the words of a row pair -> its 32 channels as two left operands.
__device__ __forceinline__ void unpack(u32 (&a)[8], const uint4& top_words, const uint4& bottom_words, int j,
                                       const Row& top, const Row& bottom) {
  const u32 words[8] = {top_words.x, bottom_words.x, top_words.y, bottom_words.y,
                        top_words.z, bottom_words.z, top_words.w, bottom_words.w};
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const Row& row = i % 2 ? bottom : top;
    const u32 zero = j % 2 ? row.odd : row.even, scale = j % 2 ? row.scale_odd : row.scale_even;
    const u32 field = (j < 2 ? words[i] : words[i] >> 8) & (j % 2 ? 0x00F000F0u : 0x000F000Fu);
#if HALF
    a[i] = mul2(fma2(field | 0x64006400u, j % 2 ? 0x2C002C00u : 0x3C003C00u, zero), scale);
#else
    a[i] = HAS_ZEROS ? mul2(sub2(field, zero), scale) : fma2(field, scale, zero);
#endif
  }
}

// 64 channels of BM tokens in rows of 128 bytes, swizzled; zeros beyond the tensor.
__device__ __forceinline__ void copy_box(u32 to, const TensorMap* x, int channel, int token, u32 bar) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
      ::"r"(to), "l"(x), "r"(channel), "r"(token), "r"(bar) : "memory");
}

// One thread.
__device__ __forceinline__ void bring_activations(const Problem& p, const TensorMap* x, char* smem, u32 full,
                                                  u32 empty) {
  int tile = p.begin / p.steps, step = p.begin % p.steps, token = tile % p.tiles_m * BM, stage = 0, parity = 1;
  wait_for_kernel_before();
  for (int u = p.begin; u < p.end; u++) {
    barrier_wait(empty + 8 * stage, parity);
    const u32 to = shared_address(smem + stage * X_BYTES), bar = full + 8 * stage;
    copy_box(to, x, step * 128, token, bar);
    copy_box(to + BM * 128, x, step * 128 + 64, token, bar);
    if (++step == p.steps) {
      step = 0;
      token = ++tile % p.tiles_m * BM;
    }
    if (++stage == STAGES) {
      stage = 0;
      parity ^= 1;
    }
  }
}

__device__ __forceinline__ void store_piece(const Problem& p, int tile, int piece, float4 sum) {
  const int block = tile / p.tiles_m * TILES + threadIdx.x / 128 * SUB + piece / (BM / 8);
  store_block(sum, p.bias, p.out, tile % p.tiles_m * BM + piece % (BM / 8) * 8,
              block * 64 + threadIdx.x % 128 / 32 * 16, p.M, p.N);
}

// Programs of a shared tile in its counter: how many have written (bits 0 to 7), are done (8 to 15), which have left.
constexpr u32 ONE_DONE = 1 << 8, ONE_LEFT = 1 << 16;
constexpr long long PATIENCE = 200000;  // clocks, 0.1 ms

// The shares that this program shall add, a bit each; none when it has left its own to the last one that writes. Who
// waits keeps its place: programs of many streams, each waiting for others of its launch, could keep all places for
// ever.
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
  constexpr int PIECES_AT_ONCE = PIECES < 4 ? PIECES : 4;  // pieces, for enough loads under way
  const int shift = warpgroup * PIECES % count;      // evens out what the warpgroups do
  for (int i = (share + shift) % count; i < PIECES; i += PIECES_AT_ONCE * count) {
    float4 sum[PIECES_AT_ONCE];
#pragma unroll
    for (int q = 0; q < PIECES_AT_ONCE; q++) sum[q] = make_float4(0, 0, 0, 0);
#pragma unroll 4
    for (int program = first; program < first + count; program++)
#pragma unroll
      for (int q = 0; q < PIECES_AT_ONCE; q++)
        if (i + q * count < PIECES) add(sum[q], __ldcg(part_of(p, program, false) + (i + q * count) * 128));
#pragma unroll
    for (int q = 0; q < PIECES_AT_ONCE; q++)
      if (i + q * count < PIECES) store_piece(p, tile, i + q * count, sum[q]);
  }
}

// Where every tile has as many programs, all done at the same time, each adds a share of the pieces.
__device__ __forceinline__ void share_tile(const Problem& p, int tile, const float (&acc)[SUB][BM / 2]) {
  __shared__ u32 claimed[WARPGROUPS];
  const int warpgroup = threadIdx.x / 128, count = p.steps * gridDim.x / p.units, first = tile * count;
#pragma unroll
  for (int i = 0; i < PIECES; i++) __stcg(part_of(p, blockIdx.x, false) + i * 128, piece_of(acc, i));
  sync_warpgroup();
  if (threadIdx.x % 128 == 0)
    claimed[warpgroup] = claim_shares((u32*)p.counters + first * WARPGROUPS + warpgroup, count, blockIdx.x - first);
  sync_warpgroup();
  for (u32 shares = claimed[warpgroup]; shares; shares &= shares - 1)
    add_share(p, tile, first, count, __ffs(shares) - 1);
}

// After a program's last step of a tile.
__device__ __forceinline__ void end_tile(const Problem& p, int tile, int k_begin, char* smem,
                                         float (&acc)[SUB][BM / 2]) {
  const int tiles = p.units / p.steps;
  if (CLUSTER > 1)
    sum_cluster(p, tile, smem, acc);
  else if (gridDim.x > tiles && gridDim.x % tiles == 0)
    share_tile(p, tile, acc);
  else
    sum_tile(p, tile, k_begin, smem, acc);
}

__device__ __forceinline__ void multiply(const Problem& p, char* smem, u32 full, u32 empty) {
  const int warpgroup = threadIdx.x / 128, lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  constexpr int SLICES = 4 / GROUPS;
  constexpr bool AHEAD = BUFFERS == 1;  // words of the next step are loaded before the last burst of a step
  float acc[SUB][BM / 2];
  u32 a[BUFFERS][SUB][BURST / 2][8];
  uint4 top[SUB], bottom[SUB];
  Row row_top[SUB], row_bottom[SUB];
  int stage = 0, parity = 0;
  const auto load_scales = [&](int g) {
#pragma unroll
    for (int s = 0; s < SUB; s++) {
      const int row = (warpgroup * SUB + s) * 64 + warp * 16 + lane / 4;
      const char* scale_at = smem + S_AT + stage * S_BYTES + g * ROWS * SCALE_BYTES;
      row_top[s] = row_of(load_scale(scale_at, row), zero_of(smem, stage, g, row));
      row_bottom[s] = row_of(load_scale(scale_at, row + 8), zero_of(smem, stage, g, row + 8));
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
      // the low half of a descriptor, where the compiler may take it for the same in all lanes
      const u32 b = __shfl_sync(~0u, (shared_address(smem + stage * X_BYTES) & 0x3FFFF) >> 4 | 1 << 16, 0);
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
            unpack(w[s][i], top[s], bottom[s], j, row_top[s], row_bottom[s]);
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
          const u32 at = b + j / 2 * (BM * 128 / 16) + j % 2 * 4;
#pragma unroll
          for (int s = 0; s < SUB; s++) {
            wgmma(acc[s], w[s][i], X_ROWS | at);
            wgmma(acc[s], w[s][i] + 4, X_ROWS | (at + 2));
          }
        }
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
      }
    }
    wgmma_wait<0>();
    if (lane == 0) barrier_arrive(empty + 8 * (stage == 0 ? STAGES - 1 : stage - 1));
    wait_for_kernel_before();
    end_tile(p, tile, k_begin, smem, acc);
    u += k_end - k_begin;
  }
}

#define SET_REGISTERS(direction, count) \
  if (count) asm volatile("setmaxnreg." direction ".sync.aligned.u32 %0;" ::"n"(count ? count : 24))

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
    w4a16_hopper(const __grid_constant__ TensorMap x, const char* packed, const char* scales, const u8* zeros,
                 const u16* bias, u16* out, float4* partial, int* counters, int M, int N, int K, int group,
                 int groups) {
  extern __shared__ __align__(1024) char smem[];
  const int tiles_m = (M + BM - 1) / BM, steps = (K + 127) / 128;
  const int units = (N + ROWS - 1) / ROWS * tiles_m * steps;
  const Problem p{
      nullptr, packed, scales, zeros, bias, out, M, N, K, group, groups,
      steps, tiles_m, units, first_unit(blockIdx.x, units), first_unit(blockIdx.x + 1, units),
      partial, counters};
  const u32 full = shared_address(smem + BAR_AT), empty = full + 8 * STAGES;
  begin_barriers(full, empty, 1);
  if (threadIdx.x >= MULTIPLIERS) {
    SET_REGISTERS("dec", PRODUCE_REGISTERS);
    if (threadIdx.x == MULTIPLIERS) produce_weights(p, smem, full, empty);
    if (threadIdx.x == MULTIPLIERS + 32) bring_activations(p, &x, smem, full, empty);
    pass_cluster();
  } else {
    SET_REGISTERS("inc", REGISTERS);
    multiply(p, smem, full, empty);
  }
}
