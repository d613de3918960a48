// 4-bit weights times 16-bit activations on Hopper: out[m, n] = sum_k x[m, k] * w[n, k]. Weights are the left operand
// and never leave the registers that they are unpacked in. Read in this order: instructions (hopper_instructions.cu),
// what both kernels begin with, ends of outputs (w4a16_hopper_ends.cu), sums over programs (w4a16_hopper_sums.cu), and
// one of the kernels.
//
// One thread brings packed words, one or a warp activations of a unit to a ring in shared memory; warpgroups unpack and
// multiply. A unit is one step, 128 channels, of an output tile; programs share the units of all tiles evenly. Defines
// come from `w4a16_hopper.py`:
//   BM, ROWS        tokens and output channels of a tile
//   STAGES          of the ring
//   WARPGROUPS      that multiply
//   HALF            0 bf16, 1 fp16
//   GROUPS          of a step: 1, 2, 4
//   SCALE           0 fp16, 1 bf16, 2 fp32
//   HAS_ZEROS, and MIDDLE, the zero point without zeros
//   CLUSTER         programs of a tile that add through each other's shared memory; 1: through global memory
//   RESIDENT        programs of a multiprocessor
//   BURST, BUFFERS, WGMMA, REGISTERS, PRODUCE_REGISTERS   of w4a16_hopper_many.cu; BURST is 0 for w4a16_hopper_few.cu
//   NORMED, EPS, GATED, ADDS, OFFSET, ORDERED             of w4a16_hopper_ends.cu; 0 for w4a16_hopper_many.cu
//   X_INTERLEAVED   how activations lie (interleaved_rows.py), of w4a16_hopper_few.cu

constexpr int TILES = ROWS / 64;          // packed tiles of a step
constexpr int SUB = TILES / WARPGROUPS;   // of a warpgroup
constexpr int PIECES = SUB * (BM / 8);    // of 64 outputs by 8 tokens
constexpr int SCALE_BYTES = SCALE == 2 ? 4 : 2;
constexpr int X_BYTES = BM * 256;
constexpr int W_BYTES = ROWS * 64;
constexpr int S_BYTES = GROUPS * ROWS * SCALE_BYTES;
constexpr int Z_BYTES = HAS_ZEROS ? GROUPS * ROWS : 0;
constexpr int W_AT = STAGES * X_BYTES;
constexpr int S_AT = W_AT + STAGES * W_BYTES;
constexpr int Z_AT = S_AT + STAGES * S_BYTES;
constexpr int BAR_AT = Z_AT + STAGES * Z_BYTES;
constexpr float SUM_UNIT = BURST > 0 && !HALF ? 0x1p48f : 1.0f;  // bf16 weights of many tokens are that much too small
constexpr int WARPS = 4 * WARPGROUPS;  // that multiply
constexpr int MULTIPLIERS = 32 * WARPS;
constexpr int PARTS = GATED ? 2 : 1;                   // of an output: pieces that become one
constexpr int OUTPUTS = PIECES / PARTS;                // pieces of outputs
constexpr int X_ON_BARRIER = BURST > 0 ? X_BYTES : 0;  // activations that come as bulk copies
constexpr int TOLD_AT = (BAR_AT + 16 * STAGES + 127) / 128 * 128;  // what a thread tells its warpgroup
constexpr int FACTORS_AT = TOLD_AT + 64;                           // [BM] fp32, with NORMED
constexpr int PARTS_AT = BURST > 0 ? 0 : TOLD_AT + 128;            // of a cluster; of many tokens where the ring was

__device__ __forceinline__ void copy_bulk(u32 to, const void* from, u32 bytes, u32 bar) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "l"(from), "r"(bytes), "r"(bar) : "memory");
}
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
  const u16* bias;
  u16* out;
  int M, N, K, group, groups;
  int steps, tiles_m;  // of a tile, of the tokens
  int units;           // unit u is step u % steps of tile u / steps
  int begin, end;      // of this program
  float4* partial;     // [programs, 2, WARPGROUPS, PIECES, 128] parts of tiles
  int* counters;       // [programs, WARPGROUPS] of tiles by their first program, zero before and after a launch
  // of w4a16_hopper_ends.cu:
  const float* squares;   // [M, K / 16] with NORMED
  const u16* residual;    // [M, N] with ADDS
  const u16* norm;        // [N] with ADDS 2, as the next two
  u16* rows;              // [M, N], interleaved with ORDERED
  float* new_squares;     // [M, N / 16]
  const int* places;      // with ORDERED, where channels of `rows`, or of the gated output, come to lie
};

__device__ __forceinline__ int first_unit(int program, int units) {
  return (int)((long long)units * program / gridDim.x);
}
__device__ __forceinline__ int program_of(int unit, int units) {
  return (int)(((long long)(unit + 1) * gridDim.x - 1) / units);
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
    first_block = tile / p.tiles_m * (TILES / PARTS);
    rows = min(ROWS, p.N - first_block * 64 * PARTS);
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
  barrier_expect(full, X_ON_BARRIER + at.blocks * 4096 + GROUPS * at.rows * (SCALE_BYTES + HAS_ZEROS));
  const u32 w_to = shared_address(smem + W_AT + stage * W_BYTES);
  const u32 s_to = shared_address(smem + S_AT + stage * S_BYTES), z_to = shared_address(smem + Z_AT + stage * Z_BYTES);
  constexpr int OF_PART = TILES / PARTS;  // blocks of gate, then as many of up, which stand half a weight further on
  const int part_rows = at.rows / PARTS;
#pragma unroll
  for (int i = 0; i < TILES; i++) {
    const long long block = i % OF_PART + i / OF_PART * (p.N / 128);
    if (i % OF_PART < at.blocks / PARTS) copy_bulk(w_to + i * 4096, at.words + block * p.steps * 4096, 4096, full);
  }
#pragma unroll
  for (int g = 0; g < GROUPS; g++)
#pragma unroll
    for (int part = 0; part < PARTS; part++) {
      const int to = g * ROWS + part * (ROWS / PARTS);
      const long long row = (long long)min(at.group + g, p.groups - 1) * p.N + at.first_block * 64 + part * (p.N / 2);
      copy_bulk(s_to + to * SCALE_BYTES, p.scales + row * SCALE_BYTES, part_rows * SCALE_BYTES, full);
      if (HAS_ZEROS) copy_bulk(z_to + to, p.zeros + row, part_rows, full);
    }
}

// One thread: packed words, scales and zeros. They depend on no kernel before this one, so it does not wait.
__device__ __forceinline__ void produce_weights(const Problem& p, char* smem, u32 full, u32 empty) {
  if (p.begin == p.end) return;
  Walk at(p);
  int stage = 0, parity = 1;
  for (int u = p.begin; u < p.end; u++, at.next(p)) {
    barrier_wait(empty + 8 * stage, parity);
    load_unit(p, at, smem, stage, full + 8 * stage);
    if (++stage == STAGES) {
      stage = 0;
      parity ^= 1;
    }
  }
}

__device__ __forceinline__ void begin_barriers(u32 full, u32 empty, int filled) {
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; i++) {
      barrier_init(full + 8 * i, filled);
      barrier_init(empty + 8 * i, 4 * WARPGROUPS);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
