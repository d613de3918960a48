// Few tokens: `mma.sync`, whose cost falls with the tokens where a `wgmma` takes 32 cycles for 8 of them. Group scales
// multiply fp32 sums.
//
// The programs of two kernels fit one multiprocessor: those of the next one bring their first weights while these add and
// store. One thread brings weights, one warp activations; they walk over units without dividing (one producer with integer
// divisions cost 0.58 us a unit, more than a unit's bytes). More defines:
//   CLUSTER    programs of a tile that add through each other's shared memory; 1: through global memory
//   RESIDENT   programs of a multiprocessor
constexpr int WARPS = 4 * WARPGROUPS;
constexpr int FEW_THREADS = MULTIPLIERS + 64;
constexpr int SUMS = (PIECES * WARPS + CLUSTER - 1) / CLUSTER;  // of a warp's piece, made by a program of a cluster
constexpr int PARTS_AT = (BAR_AT + 16 * STAGES + 127) / 128 * 128;

// A nibble in the low bits of a 16-bit float is a subnormal number, the code times 2^-133 (bf16) or 2^-24 (fp16), and one
// in the next four bits 16 times that, also where they are normal. So two slices need no shift, the others one between
// them, and one multiplication and addition centres them. Centred they are 2^-6 or 2^-9 of what they should be.
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
__device__ __forceinline__ u32 fma2(u32 a, u32 b, u32 c) {
  u32 d;
  asm("fma.rn." T2 " %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}

// Where the weights of a program's units lie, one after the other.
struct Walk {
  const char* words;
  int tile, step, first_block, rows, blocks, group, in_group;

  __device__ __forceinline__ Walk(const Problem& p) {
    step = p.begin % p.steps;
    enter(p, p.begin / p.steps);
  }
  __device__ __forceinline__ void enter(const Problem& p, int new_tile) {
    tile = new_tile;
    first_block = tile / p.tiles_m * TILES;
    rows = min(ROWS, p.N - first_block * 64);
    blocks = (rows + 63) / 64;
    words = p.packed + ((long long)first_block * p.steps + step) * 4096;
    group = GROUPS > 1 ? step * GROUPS : step * 128 / p.group;
    in_group = GROUPS > 1 ? 0 : step * 128 - group * p.group;
  }
  __device__ __forceinline__ void next(const Problem& p) {
    words += 4096;
    in_group += 128;
    if (GROUPS > 1)
      group += GROUPS;
    else if (in_group == p.group) {
      in_group = 0;
      group++;
    }
    if (++step == p.steps) {
      step = 0;
      enter(p, tile + 1);
    }
  }
};

__device__ __forceinline__ void load_unit(const Problem& p, const Walk& at, char* smem, int stage, u32 full) {
  barrier_expect(full, at.blocks * 4096 + GROUPS * at.rows * (SCALE_BYTES + HAS_ZEROS));
  const u32 w_to = shared_address(smem + W_AT + stage * W_BYTES);
#pragma unroll
  for (int i = 0; i < TILES; i++)
    if (i < at.blocks) copy_bulk(w_to + i * 4096, at.words + (long long)i * p.steps * 4096, 4096, full);
#pragma unroll
  for (int g = 0; g < GROUPS; g++) {
    const long long from = (long long)min(at.group + g, p.groups - 1) * p.N + at.first_block * 64;
    copy_bulk(shared_address(smem + S_AT + stage * S_BYTES + g * ROWS * SCALE_BYTES), p.scales + from * SCALE_BYTES,
              at.rows * SCALE_BYTES, full);
    if (HAS_ZEROS)
      copy_bulk(shared_address(smem + Z_AT + stage * Z_BYTES + g * ROWS), p.zeros + from, at.rows, full);
  }
}

// One thread: packed words, scales and zeros. They depend on no kernel before this one, so it does not wait.
__device__ __forceinline__ void produce_weights(const Problem& p, char* smem, u32 full, u32 empty) {
  if (p.begin == p.end) return;
  Walk at(p);
  int stage = 0, parity = 1;
  for (int u = p.begin; u < p.end; u++, at.next(p)) {
    if (u >= p.begin + STAGES) barrier_wait(empty + 8 * stage, parity);
    load_unit(p, at, smem, stage, full + 8 * stage);
    if (++stage == STAGES) {
      stage = 0;
      parity ^= 1;
    }
  }
}

// One warp: activations, of a unit two halves of 64 channels, rows of 128 bytes whose 16-byte pieces are swizzled by the
// row.
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
    for (int i = 0; i < BM / 2; i++) {
      const int r = row + 2 * i;
      const bool live = k < p.K && m0 + r < p.M;
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to + stage * X_BYTES + r * 128 +
                                                                         ((chunk % 8) ^ (r % 8)) * 16),
                   "l"(live ? x + (long long)2 * i * p.K : p.x), "r"(live ? 16 : 0) : "memory");
    }
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

// The programs of a cluster have one tile and run at the same time: each adds its share of the pieces, which the others
// send to its shared memory.
__device__ __forceinline__ void sum_cluster(const Problem& p, int tile, char* smem, const float (&acc)[SUB][BM / 2]) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, rank = blockIdx.x % CLUSTER;
  const u32 parts = shared_address(smem + PARTS_AT) + lane * 16;  // [SUMS, CLUSTER, 32] float4
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");  // all have started
#pragma unroll
  for (int i = 0; i < PIECES; i++) {
    const int q = i * WARPS + warp;
    const float4 v = piece_of(acc, i);
    u32 to;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(to) : "r"(parts + (q / CLUSTER * CLUSTER + rank) * 512),
        "r"(q % CLUSTER));
    asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w)
                 : "memory");
  }
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
  for (int slot = warp; slot < SUMS; slot += WARPS) {
    const int q = slot * CLUSTER + rank, piece = q / WARPS, from = q % WARPS;
    if (q >= PIECES * WARPS) break;
    float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll
    for (int r = 0; r < CLUSTER; r++) {
      float4 v;
      asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                   : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(parts + (slot * CLUSTER + r) * 512));
      add(sum, v);
    }
    const int block = tile / p.tiles_m * TILES + from / 4 * SUB + piece / (BM / 8);
    store_block(sum, p.bias, p.out, tile % p.tiles_m * BM + piece % (BM / 8) * 8, block * 64 + from % 4 * 16, p.M, p.N);
  }
}

__device__ __forceinline__ void sync_warpgroup() {  // a barrier known when compiled: else all 16 count as used
  const int warpgroup = threadIdx.x / 128;
  if (WARPGROUPS == 1 || warpgroup == 0)
    asm volatile("bar.sync 1, 128;" ::: "memory");
  else if (WARPGROUPS == 2 || warpgroup == 1)
    asm volatile("bar.sync 2, 128;" ::: "memory");
  else
    asm volatile("bar.sync 3, 128;" ::: "memory");
}

// What the first thread of a warpgroup found, for all of it.
__device__ __forceinline__ int tell_warpgroup(volatile int* told, int found) {
  if (threadIdx.x % 128 == 0) *told = found;
  sync_warpgroup();
  return *told;
}

// Of the tile that a program ends, or of the one that it begins.
__device__ __forceinline__ float4* part_of(const Problem& p, int program, bool begins) {
  return p.partial + (long long)((2 * program + begins) * WARPGROUPS + threadIdx.x / 128) * (PIECES * 128) +
         threadIdx.x % 128;
}

// Whether this program is the last of `others` + 1 at its tile and shall add their parts. If not, it has left its own.
__device__ __forceinline__ bool arrive_last(const Problem& p, int tile, int others, bool begins, char* smem,
                                            const float (&acc)[SUB][BM / 2], bool& has_own) {
  int* counter = p.counters + tile * WARPGROUPS + threadIdx.x / 128;
  volatile int* told = (volatile int*)(smem + PARTS_AT) + threadIdx.x / 128;
  int before = 0;
  has_own = false;
  if (begins && gridDim.x % (p.units / p.steps)) {  // shared unevenly: the others had this tile first, and are done
    if (threadIdx.x % 128 == 0)
      asm volatile("ld.acquire.gpu.s32 %0, [%1];" : "=r"(before) : "l"(counter) : "memory");
    has_own = tell_warpgroup(told + WARPGROUPS, before) == others;
    sync_warpgroup();
  }
  if (!has_own) {
#pragma unroll
    for (int i = 0; i < PIECES; i++) __stcg(part_of(p, blockIdx.x, begins) + i * 128, piece_of(acc, i));
    sync_warpgroup();
    if (threadIdx.x % 128 == 0)
      asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
    if (tell_warpgroup(told, before) != others) return false;
  }
  if (threadIdx.x % 128 == 0) *counter = 0;
  return true;
}

// The last program at a tile adds all parts in the order of the programs, so a result does not depend on timing. Nobody
// waits for another: programs that wait keep their places, and on many streams they could keep all.
__device__ __forceinline__ void sum_tile(const Problem& p, int tile, int k_begin, char* smem, float (&acc)[SUB][BM / 2]) {
  const int first = program_of(tile * p.steps, p.units), last = program_of(tile * p.steps + p.steps - 1, p.units);
  if (first < last) {
    bool has_own;
    if (!arrive_last(p, tile, last - first, k_begin == 0, smem, acc, has_own)) return;
#pragma unroll
    for (int s = 0; s < SUB; s++)
#pragma unroll
      for (int i = 0; i < BM / 2; i++) acc[s][i] = has_own ? acc[s][i] : 0.0f;
#pragma unroll 4
    for (int program = first + has_own; program <= last; program++)
#pragma unroll
      for (int i = 0; i < PIECES; i++) {
        float* v = &acc[i / (BM / 8)][i % (BM / 8) * 4];
        const float4 part = __ldcg(part_of(p, program, program == first) + i * 128);
        v[0] += part.x;
        v[1] += part.y;
        v[2] += part.z;
        v[3] += part.w;
      }
  }
#pragma unroll
  for (int i = 0; i < PIECES; i++) store_piece(p, tile, i, piece_of(acc, i));
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

__device__ __forceinline__ void multiply_unit(const char* smem, int stage, float (&acc)[SUB][BM / 2]) {
  constexpr int SLICES = 4 / GROUPS;
  const int warpgroup = threadIdx.x / 128, lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const u32 words_at = shared_address(smem + W_AT + stage * W_BYTES) + warpgroup * SUB * 4096 + warp * 1024 + lane * 16;
  const u32 x_row = shared_address(smem + stage * X_BYTES) + lane % 8 * 128;
  uint4 top[SUB], bottom[SUB];
#pragma unroll
  for (int s = 0; s < SUB; s++) {
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(top[s].x), "=r"(top[s].y), "=r"(top[s].z), "=r"(top[s].w) : "r"(words_at + s * 4096));
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(bottom[s].x), "=r"(bottom[s].y), "=r"(bottom[s].z), "=r"(bottom[s].w)
                 : "r"(words_at + s * 4096 + 512));
  }
  float part[SUB][BM / 8][4], scale_top[SUB], scale_bottom[SUB];
  u32 minus_top[SUB], minus_bottom[SUB];
#pragma unroll
  for (int j = 0; j < 4; j++) {
    u32 b[BM / 8][4];
#pragma unroll
    for (int n = 0; n < BM / 8; n++) {
      const u32 at = x_row + j / 2 * (BM * 128) + n * 1024 + (((j % 2 * 4 + lane / 8) ^ (lane % 8)) * 16);
      asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                   : "=r"(b[n][0]), "=r"(b[n][1]), "=r"(b[n][2]), "=r"(b[n][3]) : "r"(at));
    }
#pragma unroll
    for (int s = 0; s < SUB; s++) {
      const int g = j / SLICES, row = (warpgroup * SUB + s) * 64 + warp * 16 + lane / 4;
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

__device__ __forceinline__ void multiply(const Problem& p, char* smem, u32 full, u32 empty) {
  float acc[SUB][BM / 2];
  int stage = 0, parity = 0;
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
    if (CLUSTER > 1)
      sum_cluster(p, tile, smem, acc);
    else
      sum_tile(p, tile, k_begin, smem, acc);
    u += k_end - k_begin;
  }
}

extern "C" __global__ void __launch_bounds__(FEW_THREADS, RESIDENT)
    w4a16_hopper(const u16* x, const char* packed, const char* scales, const u8* zeros, const u16* bias, u16* out,
                 float4* partial, int* counters, int M, int N, int K, int group, int groups) {
  extern __shared__ __align__(1024) char smem[];
  const int tiles_m = (M + BM - 1) / BM, steps = (K + 127) / 128;
  const int units = (N + ROWS - 1) / ROWS * tiles_m * steps;
  const Problem p{x,     packed, scales, zeros, bias,  out,
                  M,     N,      K,       group, groups,  steps, tiles_m,
                  units, first_unit(blockIdx.x, units), first_unit(blockIdx.x + 1, units), partial, counters};
  const u32 full = shared_address(smem + BAR_AT), empty = full + 8 * STAGES;
  begin_barriers(full, empty, 33);  // the lanes that bring activations, and the bytes
  if (CLUSTER > 1) asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
  if (threadIdx.x < MULTIPLIERS)
    multiply(p, smem, full, empty);
  else if (threadIdx.x >= MULTIPLIERS + 32)
    produce_x(p, smem, full, empty);
  else if (threadIdx.x == MULTIPLIERS)
    produce_weights(p, smem, full, empty);
}
