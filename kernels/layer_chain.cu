// The four products between two attentions of a few tokens in one launch (`layer_chain.py`): output (+ residual, the
// norm's weight), gate-up (gated), down (+ residual, the next norm's weight), QKV of the next layer.
//
// One program a multiprocessor. Each owns whole outputs, 16 at a time, and its warps share their channels, so nothing
// is summed over programs. One thread brings words and scales of all products to a ring in shared memory and never
// waits for a product before: while the others wait for activations, the ring fills. But it asks for two stages at a
// time: what is under way delays the activations, since the memory answers in turn. Those go from product to product
// through the L2 without a barrier or a counter: memory is all ones before, a word of two bf16 that no rounding yields,
// and who reads asks again until every word is something else. So programs must run at the same time; who waits for
// a minute traps. Read after hopper_instructions.cu. Defines come from `layer_chain.py`:
//   HALF                    0: activations are bf16
//   M                       tokens
//   KO, HID, INTER, QKV     channels of attention, hidden, of the MLP, outputs of QKV
//   PROGRAMS                multiprocessors
//   WARPS                   that multiply; a stage of the ring has a step, 128 channels by 16 outputs, for each
//   STAGES                  of the ring
//   SCALE                   0 fp16, 1 bf16
//   EPS, OFFSET, NEXT_EPS, NEXT_OFFSET   of the norms
//   ORDERED                 products may read their channels in an order (act-order)

constexpr int MULTIPLIERS = 32 * WARPS, THREADS = MULTIPLIERS + 32;
constexpr int WORD_BYTES = WARPS * 1024, STAGE_BYTES = WORD_BYTES + WARPS * 32;
enum Product { OUTPUT, GATE_UP, DOWN, NEXT_QKV };
constexpr int MOST_TRIES = 1 << 26;  // of a microsecond or so

__device__ constexpr int most(int a, int b) { return a > b ? a : b; }
__device__ constexpr int share(int units) { return (units + PROGRAMS - 1) / PROGRAMS; }
constexpr int MOST_STEPS = most(most(KO, HID), INTER) / 128;
constexpr int WARP_STEPS = (MOST_STEPS + WARPS - 1) / WARPS;
constexpr int X_ROW = WARP_STEPS * 256 + (M > 1 ? 16 : 0);  // rows of several tokens in different banks
constexpr int X_WARP = (M * X_ROW + 127) / 128 * 128;
constexpr int HIDDEN_GROUPS = share(HID / 16), OTHER_GROUPS = most(2 * share(INTER / 16), share(QKV / 16));
constexpr int OWN = (HIDDEN_GROUPS * 16 * M + MULTIPLIERS - 1) / MULTIPLIERS;  // hidden values of a thread
constexpr int GROUP_PARTS = WARPS * 16 * M;
constexpr int X_AT = (STAGES * STAGE_BYTES + 127) / 128 * 128;
constexpr int AS_THEY_COME_AT = X_AT + WARPS * X_WARP;  // rows that are put in an order
// Instead of tokens beyond M, in other banks than token 0.
constexpr int ZERO_AT = AS_THEY_COME_AT + (ORDERED ? M * MOST_STEPS * 256 : 0) + 64;
constexpr int PARTS_AT = ZERO_AT + 576;
constexpr int FACTORS_AT = PARTS_AT + (OTHER_GROUPS + HIDDEN_GROUPS) * GROUP_PARTS * 4;
constexpr int BAR_AT = FACTORS_AT + 64;

// What is exchanged, in words: rows and squares of the two norms, gated channels.
constexpr int ROWS_AT = 0, GATED_AT = ROWS_AT + M * HID / 2, NEXT_ROWS_AT = GATED_AT + M * INTER / 2;
constexpr int SQUARES_AT = NEXT_ROWS_AT + M * HID / 2, NEXT_SQUARES_AT = SQUARES_AT + M * HID / 16;

struct alignas(64) Map { u64 opaque[16]; };
struct Maps { Map words[4], scales[4]; };

__device__ __forceinline__ int channels_of(int q) { return q == OUTPUT ? KO : q == DOWN ? INTER : HID; }
__device__ __forceinline__ int steps_of(int q) { return channels_of(q) / 128; }
__device__ __forceinline__ int units_of(int q) { return (q == GATE_UP ? INTER : q == NEXT_QKV ? QKV : HID) / 16; }
// Of this program: every PROGRAMS-th, since the four of a tile of packed words come cheaper at about one time.
__device__ __forceinline__ int unit_count(int q) { return (units_of(q) - (int)blockIdx.x + PROGRAMS - 1) / PROGRAMS; }
__device__ __forceinline__ int unit_at(int i) { return blockIdx.x + i * PROGRAMS; }
__device__ __forceinline__ int channel_at(int row) { return unit_at(row / 16) * 16 + row % 16; }

__device__ __forceinline__ void sync_threads(int count) { asm volatile("bar.sync 1, %0;" ::"r"(count) : "memory"); }
__device__ __forceinline__ float low(u32 word) { return __uint_as_float(word << 16); }
__device__ __forceinline__ float rounded(float v) { return low(pack2(v, v)); }

// One thread: words and scales of all products. Boxes of a step of 16 outputs for each warp; what is beyond K is zero.
__device__ __forceinline__ void copy_stage(const Maps& maps, int q, int group, int step, u32 to, u32 bar) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], "
      "[%6];" ::"r"(to), "l"(maps.words + q), "r"(0), "r"(group % 4), "r"(step), "r"(group / 4), "r"(bar) : "memory");
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::
          "r"(to + WORD_BYTES), "l"(maps.scales + q), "r"(group * 16), "r"(step), "r"(bar) : "memory");
}
__device__ __forceinline__ void produce(const Maps& maps, u32 ring, u32 full, u32 empty) {
  int stage = 0, parity = 1, before = -1, before_parity = 0;
#pragma unroll 1
  for (int q = OUTPUT; q <= NEXT_QKV; q++) {
    const int steps = steps_of(q), halves = q == GATE_UP ? 2 : 1, count = unit_count(q) * halves;
#pragma unroll 1
    for (int i = 0; i < count; i++) {
      const int group = unit_at(i / halves) + i % halves * (INTER / 16);
#pragma unroll 1
      for (int step = 0; step < steps; step += WARPS) {
        barrier_wait(empty + 8 * stage, parity);
        barrier_expect(full + 8 * stage, STAGE_BYTES);
        copy_stage(maps, q, group, step, ring + stage * STAGE_BYTES, full + 8 * stage);
        if (before >= 0) barrier_wait(full + 8 * before, before_parity);
        before = stage;
        before_parity = parity ^ 1;
        stage = stage + 1 == STAGES ? 0 : stage + 1;
        parity ^= stage == 0;
      }
    }
  }
}

__device__ __forceinline__ uint4 load_fresh(const void* p) {
  uint4 v;
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ void store_fresh(u32* p, u32 v) {
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
__device__ __forceinline__ bool misses(uint4 v) { return v.x == ~0u || v.y == ~0u || v.z == ~0u || v.w == ~0u; }
// `v`, or what comes to lie where it was read from.
__device__ __forceinline__ uint4 once_there(uint4 v, const void* p) {
  for (int tries = 0; misses(v); tries++) {
    v = load_fresh(p);
    if (tries > MOST_TRIES) __trap();
  }
  return v;
}

__device__ __forceinline__ void store_shared(u32 at, uint4 v) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
// Two channels of a row in shared memory, which `places` has the numbers of.
__device__ __forceinline__ u32 two_of(u32 row, u32 places) {
  u16 first, second;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(first) : "r"(row + places % 65536 * 2) : "memory");
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(second) : "r"(row + places / 65536 * 2) : "memory");
  return first | (u32)second << 16;
}

// A warp's share of rows `[M][K]`: of each stage its step. `there`: the kernel before wrote them. Rows in an `order`
// come to `as_they_come` as a whole first; channels that are read from there at once lie in different banks as far as
// `channel_order` of `quant/pack.py` could choose.
__device__ __forceinline__ void load_rows(const u16* rows, int q, bool there, u32 to, const u16* order,
                                          u32 as_they_come) {
  constexpr int BATCH = (WARP_STEPS + 1) / 2;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const bool in_order = ORDERED && order != nullptr;
  uint4 places[ORDERED ? BATCH : 1];
  __syncwarp();
#pragma unroll
  for (int i = 0; i < (ORDERED ? BATCH : 0); i++) {
    const int step = (2 * i + lane / 16) * WARPS + warp;
    if (in_order && step < steps_of(q)) places[i] = *(const uint4*)(order + step * 128 + lane % 16 * 8);
  }
#pragma unroll
  for (int m = 0; m < M; m++) {
    const u16* from[BATCH];
    uint4 v[BATCH];
#pragma unroll
    for (int i = 0; i < BATCH; i++) {
      const int step = (2 * i + lane / 16) * WARPS + warp;
      const bool live = step < steps_of(q);
      from[i] = live ? rows + m * channels_of(q) + step * 128 + lane % 16 * 8 : nullptr;
      if (live) v[i] = load_fresh(from[i]);
    }
#pragma unroll
    for (int i = 0; i < BATCH; i++)
      if (from[i] == nullptr) v[i] = make_uint4(0, 0, 0, 0);
    for (int tries = 0; !there; tries++) {  // all that miss at once: each answer takes as long as all of them
      bool missing[BATCH], any = false;
#pragma unroll
      for (int i = 0; i < BATCH; i++) any |= missing[i] = misses(v[i]);
      if (!any) break;
#pragma unroll
      for (int i = 0; i < BATCH; i++)
        if (missing[i]) v[i] = load_fresh(from[i]);
      if (tries > MOST_TRIES) __trap();
    }
#pragma unroll
    for (int i = 0; i < BATCH; i++)
      if (from[i] != nullptr)
        store_shared(in_order ? as_they_come + (u32)(from[i] - rows) * 2 : to + m * X_ROW + (lane + 32 * i) * 16, v[i]);
  }
  if (in_order) {
    sync_threads(MULTIPLIERS);
#pragma unroll
    for (int i = 0; i < (ORDERED ? BATCH * M : 0); i++) {
      const int pair = i % BATCH, m = i / BATCH;
      const u32 row = as_they_come + m * channels_of(q) * 2;
      const uint4 p = places[pair];
      if ((2 * pair + lane / 16) * WARPS + warp < steps_of(q))
        store_shared(to + m * X_ROW + (lane + 32 * pair) * 16,
                     make_uint4(two_of(row, p.x), two_of(row, p.y), two_of(row, p.z), two_of(row, p.w)));
    }
  }
  __syncwarp();
}

// The factor of a norm, from sums of squares `[HID / 16]`.
struct Factor {
  static constexpr int COUNT = (HID / 64 + 31) / 32;
  const u32* squares;
  uint4 v[COUNT];

  __device__ __forceinline__ void ask(const u32* from) {
    squares = from + threadIdx.x % 32 * 4;
#pragma unroll
    for (int i = 0; i < COUNT; i++)
      if (threadIdx.x % 32 + 32 * i < HID / 64) v[i] = load_fresh(squares + 128 * i);
  }
  __device__ __forceinline__ float get(float eps) {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < COUNT; i++)
      if (threadIdx.x % 32 + 32 * i < HID / 64) {
        v[i] = once_there(v[i], squares + 128 * i);
        sum += __uint_as_float(v[i].x) + __uint_as_float(v[i].y);
        sum += __uint_as_float(v[i].z) + __uint_as_float(v[i].w);
      }
#pragma unroll
    for (int i = 1; i < 32; i *= 2) sum += __shfl_xor_sync(~0u, sum, i);
    return rsqrtf(sum / HID + eps);
  }
};

// A nibble in the low bits of a bf16 is a subnormal number, code * 2^-133, in the next four 16 times that; centred they
// are 2^-6 of what they should be (`w4a16_hopper_few.cu`).
constexpr u32 EVEN = 0x7F007F00u, ODD = 0x7D007D00u, MINUS_MIDDLE = 0xBE00BE00u;  // 2^127, 2^123, -8 * 2^-6
constexpr float UNIT = 64.0f;

__device__ __forceinline__ float load_scale(u32 at) {
  u16 v;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(at));
  return SCALE ? low(v) : half_to_float(v);
}
__device__ __forceinline__ void mma(float (&d)[4], const u32* a, u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// A step of 16 outputs by 8 tokens.
__device__ __forceinline__ void multiply(u32 words, u32 scales, u32 x, float (&acc)[4]) {
  const int lane = threadIdx.x % 32;
  const uint4 top = load_shared(words + lane * 16), bottom = load_shared(words + 512 + lane * 16);
  const u32 w[8] = {top.x, bottom.x, top.y, bottom.y, top.z, bottom.z, top.w, bottom.w};
  float part[4] = {};
#pragma unroll
  for (int j = 0; j < 4; j++) {  // slices of 32 channels
    u32 a[8], b[4];
    load_matrices(b, x + j * 64);
#pragma unroll
    for (int i = 0; i < 8; i++)
      a[i] = fma2((j < 2 ? w[i] : w[i] >> 8) & (j % 2 ? 0x00F000F0u : 0x000F000Fu), j % 2 ? ODD : EVEN, MINUS_MIDDLE);
    mma(part, a, b[0], b[1]);
    mma(part, a + 4, b[2], b[3]);
  }
#pragma unroll
  for (int i = 0; i < 4; i++) acc[i] += part[i] * load_scale(scales + i / 2 * 16 + lane / 4 * 2);
}

// The stages of the ring as the multiplying warps take them.
struct Ring {
  u32 at, full, empty;
  int stage, parity;

  // 16 outputs of `steps` steps, of which those of this warp: their sums `[16][M]` to `parts`.
  __device__ __forceinline__ void multiply_group(int steps, u32 x, u32 x_step, float* parts) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    float acc[4] = {};
#pragma unroll 1
    for (int step = warp; step < steps + warp; step += WARPS) {
      const u32 words = at + stage * STAGE_BYTES;
      barrier_wait(full + 8 * stage, parity);
      if (step < steps) multiply(words + warp * 1024, words + WORD_BYTES + warp * 32, x, acc);
      x += x_step;
      __syncwarp();
      if (lane == 0) barrier_arrive(empty + 8 * stage);
      stage = stage + 1 == STAGES ? 0 : stage + 1;
      parity ^= stage == 0;
    }
#pragma unroll
    for (int e = 0; e < 4; e++) {
      const int m = lane % 4 * 2 + e % 2;
      if (m < M) parts[(lane / 4 + e / 2 * 8) * M + m] = acc[e];
    }
  }
};

// Of the sums of all warps, output `row` of token `m`.
__device__ __forceinline__ float sum_parts(const float* parts, int row, int m) {
  float sum = 0;
#pragma unroll
  for (int w = 0; w < WARPS; w++) sum += parts[(row / 16 * WARPS + w) * 16 * M + row % 16 * M + m];
  return sum * UNIT;
}

// The hidden values that a thread makes: both sums to the residual are of the same channels.
struct Hidden {
  int row[OWN], at[OWN];  // of this program's outputs; m * HID + channel, -1: none
  float value[OWN], weight[OWN], next_weight[OWN];

  __device__ __forceinline__ void begin(const u16* norm, const u16* next_norm) {
    const int count = unit_count(OUTPUT) * 16;
#pragma unroll
    for (int r = 0; r < OWN; r++) {
      const int i = threadIdx.x + r * MULTIPLIERS, m = count ? i / count : M, channel = channel_at(i - m * count);
      const bool live = m < M;
      row[r] = i - m * count;
      at[r] = live ? m * HID + channel : -1;
      weight[r] = live ? low(norm[channel]) + OFFSET : 0;
      next_weight[r] = live ? low(next_norm[channel]) + NEXT_OFFSET : 0;
    }
  }
  __device__ __forceinline__ void read(const u16* residual) {
#pragma unroll
    for (int r = 0; r < OWN; r++) value[r] = at[r] < 0 ? 0 : low(residual[at[r]]);
  }
  // Adds a product; leaves what the next one needs of it in `rows` and `squares`, and itself in `out` if there is one.
  __device__ __forceinline__ void add(const float* parts, bool next, u32* rows, u32* squares, u32* out) {
#pragma unroll
    for (int r = 0; r < OWN; r++) {
      const bool live = at[r] >= 0;
      value[r] = rounded(value[r] + rounded(live ? sum_parts(parts, row[r], at[r] / HID) : 0));
      const float scaled = value[r] * (next ? next_weight[r] : weight[r]);
      const u32 word = pack2(scaled, __shfl_xor_sync(~0u, scaled, 1));
      const u32 mine = pack2(value[r], __shfl_xor_sync(~0u, value[r], 1));
      if (live && threadIdx.x % 2 == 0) {
        store_fresh(rows + at[r] / 2, word);
        if (out != nullptr) out[at[r] / 2] = mine;
      }
      float square = value[r] * value[r];
#pragma unroll
      for (int i = 1; i < 16; i *= 2) square += __shfl_xor_sync(~0u, square, i);
      if (live && threadIdx.x % 16 == 0) store_fresh(squares + at[r] / 16, __float_as_uint(square));
    }
  }
};

// Outputs of a product of normed rows: `[M][..]` words of two channels.
template <bool GATED>
__device__ __forceinline__ void end_normed(const float* parts, const float* factors, const u16* bias, u32* out) {
  constexpr int Q = GATED ? GATE_UP : NEXT_QKV, N = GATED ? INTER : QKV;
  const int count = unit_count(Q) * 16;
#pragma unroll 1
  for (int begin = threadIdx.x / 32 * 32; begin < count * M; begin += MULTIPLIERS) {
    const int i = begin + threadIdx.x % 32, m = M == 1 ? 0 : i / count, row = i - m * count;
    const bool live = i < count * M;
    float v = 0;
    if (live && GATED) {
      const float gate = rounded(sum_parts(parts, row / 16 * 32 + row % 16, m) * factors[m]);
      const float up = rounded(sum_parts(parts, row / 16 * 32 + 16 + row % 16, m) * factors[m]);
      v = rounded(gate / (1.0f + __expf(-gate))) * up;
    } else if (live) {
      v = sum_parts(parts, row, m) * factors[m] + (bias == nullptr ? 0 : low(bias[channel_at(row)]));
    }
    const u32 word = pack2(v, __shfl_xor_sync(~0u, v, 1));
    if (!live || threadIdx.x % 2) continue;
    if (GATED)
      store_fresh(out + (m * N + channel_at(row)) / 2, word);
    else
      out[(m * N + channel_at(row)) / 2] = word;
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    layer_chain(const u16* x, const u16* residual, const __grid_constant__ Maps maps, const u16* norm,
                const u16* next_norm, const u16* bias, const u16* output_order, const u16* gate_up_order,
                const u16* down_order, const u16* next_order, u32* exchange, u32* hidden, u32* out) {
  extern __shared__ __align__(1024) char smem[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  Ring ring{shared_address(smem), shared_address(smem) + BAR_AT, shared_address(smem) + BAR_AT + 8 * STAGES, 0, 0};
  if (threadIdx.x < STAGES) {
    barrier_init(ring.full + 8 * threadIdx.x, 1);
    barrier_init(ring.empty + 8 * threadIdx.x, WARPS);
  }
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  if (threadIdx.x < 128) ((u32*)(smem + ZERO_AT))[threadIdx.x] = 0;
  sync_threads(THREADS);
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");  // all programs have their places
  if (warp == WARPS) {
    if (lane == 0) produce(maps, ring.at, ring.full, ring.empty);
    return;
  }
  Hidden own;
  own.begin(norm, next_norm);
  const u32 xs = ring.at + X_AT + warp * X_WARP;
  const bool live = lane % 8 < M;
  const u32 x_row = (live ? xs + lane % 8 * X_ROW : ring.at + ZERO_AT) + lane / 8 * 16, x_step = live ? 256 : 0;
  float* factors = (float*)(smem + FACTORS_AT);
  wait_for_kernel_before();
  own.read(residual);
#pragma unroll 1
  for (int q = OUTPUT; q <= NEXT_QKV; q++) {
    const bool normed = q == GATE_UP || q == NEXT_QKV;
    float* parts = (float*)(smem + PARTS_AT) + (normed ? 0 : OTHER_GROUPS * GROUP_PARTS);
    const u32* rows = exchange + (q == GATE_UP ? ROWS_AT : q == DOWN ? GATED_AT : NEXT_ROWS_AT);
    const u16* order = !ORDERED       ? nullptr
                       : q == OUTPUT  ? output_order
                       : q == GATE_UP ? gate_up_order
                       : q == DOWN    ? down_order
                                      : next_order;
    load_rows(q == OUTPUT ? x : (const u16*)rows, q, q == OUTPUT, xs, order, ring.at + AS_THEY_COME_AT);
    Factor factor;
    const int token = WARPS - 1 - warp;  // whose factor this warp makes
    if (normed && token < M) factor.ask(exchange + (q == GATE_UP ? SQUARES_AT : NEXT_SQUARES_AT) + token * (HID / 16));
    const int groups = unit_count(q) * (q == GATE_UP ? 2 : 1);
#pragma unroll 1
    for (int g = 0; g < groups; g++)
      ring.multiply_group(steps_of(q), x_row, x_step, parts + (g * WARPS + warp) * 16 * M);
    if (normed && token < M) {
      const float value = factor.get(q == GATE_UP ? EPS : NEXT_EPS);
      if (lane == 0) factors[q / 2 * 8 + token] = value;
    }
    sync_threads(MULTIPLIERS);
    if (q == OUTPUT || q == DOWN) {
      const bool next = q == DOWN;
      own.add(parts, next, exchange + (next ? NEXT_ROWS_AT : ROWS_AT), exchange + (next ? NEXT_SQUARES_AT : SQUARES_AT),
              next ? hidden : nullptr);
    } else if (q == GATE_UP) {
      end_normed<true>(parts, factors, nullptr, exchange + GATED_AT);
    } else {
      end_normed<false>(parts, factors + 8, bias, out);
    }
  }
}
