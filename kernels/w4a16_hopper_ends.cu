// The ends of outputs: what becomes of the sums, and what a product of few tokens takes in of the kernels around it
// (`folded_linear.py`):
//   NORMED     its rows lack their factor 1 / sqrt(mean of squares + EPS): outputs are multiplied by it
//   GATED      tiles hold blocks of gate, then as many of up, and the output is silu(gate) * up
//   ADDS       1: the output is added to a residual. 2: and multiplied by the next norm's weight + OFFSET, beside it
//   ORDERED    what the next product reads lies in that one's order of channels (act-order), interleaved
//              (interleaved_rows.py): the eight tokens that a warp has of a channel are 16 bytes
__device__ __forceinline__ float bias_of(const u16* bias, int n, int N) {
  if (bias == nullptr || n >= N) return 0.0f;
  return HALF ? half_to_float(bias[n]) : bf16_to_float(bias[n]);
}

// 16 outputs by 8 tokens of a warp, [output][token]: two neighbouring outputs of one token in one word.
__device__ __forceinline__ void store_block(float4 v, const u16* bias, u16* out, int m, int n, int M, int N) {
  const int lane = threadIdx.x % 32;
  const bool odd = lane & 4;
  m += 2 * (lane % 4) + odd;
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const int row = n + 8 * h + lane / 4;
    const float b = bias_of(bias, row, N);
    const float v0 = (h ? v.z : v.x) * SUM_UNIT + b, v1 = (h ? v.w : v.y) * SUM_UNIT + b;
    const float other = __shfl_xor_sync(~0u, odd ? v0 : v1, 4);
    const u32 word = odd ? pack2(other, v1) : pack2(v0, other);
    if (m < M && row < N) *(u32*)(out + (long long)m * N + (row & ~1)) = word;
  }
}

__device__ __forceinline__ float rounded(float v) {
  const u32 word = pack2(v, v);
  return HALF ? half_to_float((u16)word) : bf16_to_float((u16)word);
}
__device__ __forceinline__ float gated(float gate, float up) {
  gate = rounded(gate);
  return rounded(gate / (1.0f + __expf(-gate))) * rounded(up);
}
__device__ __forceinline__ float low(u32 word) { return HALF ? half_to_float((u16)word) : bf16_to_float((u16)word); }
__device__ __forceinline__ float high(u32 word) { return low(word >> 16); }

// What is added to a lane's outputs, two of one token at a time, the next norm's weights of them, and the places of its
// two channels.
struct Beside {
  u32 residual[2], norm[2];
  int places[2];
};

// The outputs `n` to n + 15 of tokens `m` to m + 7, as `store_block` deals them out.
__device__ __forceinline__ Beside beside_of(const Problem& p, int m, int n) {
  const int lane = threadIdx.x % 32;
  Beside beside = {};
  m += 2 * (lane % 4) + lane / 4 % 2;
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const int row = (n + 8 * h + lane / 4) & ~1;
    if (ORDERED && row < p.N / PARTS) beside.places[h] = p.places[n + 8 * h + lane / 4];
    if (m < p.M && row < p.N / PARTS) {
      if (!ADDS) continue;
      beside.residual[h] = *(const u32*)(p.residual + (long long)m * p.N + row);
      if (ADDS == 2) beside.norm[h] = *(const u32*)(p.norm + row);
    }
  }
  return beside;
}

// Tokens `m` and m + 1 (m even) of a channel, for the product behind.
__device__ __forceinline__ void store_interleaved(const Problem& p, u16* rows, int m, int place, u32 word) {
  if (m < p.M) *(u32*)(rows + ((long long)(m / 8) * (p.N / PARTS) + place) * 8 + m % 8) = word;
}

// Of words that hold two channels of a token two tokens of a channel: what `store_block` did, undone.
__device__ __forceinline__ u32 tokens_of(u32 word) {
  const bool odd = threadIdx.x & 4;
  const u32 other = __shfl_xor_sync(~0u, odd ? word : word >> 16, 4);
  return odd ? __byte_perm(other, word, 0x7610) : __byte_perm(word, other, 0x5410);
}

__device__ __forceinline__ u32 next_of(u32 sum, u32 norm) {
  return pack2(low(sum) * (low(norm) + OFFSET), high(sum) * (high(norm) + OFFSET));
}

// As `store_block`, to the residual, and what the next norm needs of it.
__device__ __forceinline__ void add_block(const Problem& p, float4 v, const Beside& beside, int m, int n) {
  const int lane = threadIdx.x % 32;
  const bool odd = lane & 4;
  float squares = 0;
  m += 2 * (lane % 4) + odd;
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const int row = n + 8 * h + lane / 4;
    const float b = bias_of(p.bias, row, p.N);
    const float v0 = (h ? v.z : v.x) + b, v1 = (h ? v.w : v.y) + b;
    const float other = __shfl_xor_sync(~0u, odd ? v0 : v1, 4);
    const u32 word = odd ? pack2(other, v1) : pack2(v0, other), residual = beside.residual[h], norm = beside.norm[h];
    const u32 sum = pack2(low(residual) + low(word), high(residual) + high(word));
    squares += low(sum) * low(sum) + high(sum) * high(sum);
    if (ORDERED && row < p.N) store_interleaved(p, p.rows, m - odd, beside.places[h], tokens_of(next_of(sum, norm)));
    if (m >= p.M || row >= p.N) continue;
    const long long at = (long long)m * p.N + (row & ~1);
    *(u32*)(p.out + at) = sum;
    if (ADDS == 2 && !ORDERED) *(u32*)(p.rows + at) = next_of(sum, norm);
  }
  if (ADDS == 2) {
    squares += __shfl_xor_sync(~0u, squares, 8);
    squares += __shfl_xor_sync(~0u, squares, 16);
    if (lane < 8 && m < p.M && n < p.N) p.new_squares[m * (p.N / 16) + n / 16] = squares;
  }
}

// As `store_block`, the product of a gate and what it gates.
__device__ __forceinline__ void gate_block(const Problem& p, float4 gate, float4 up, const Beside& beside, int m,
                                           int n) {
  const int lane = threadIdx.x % 32;
  const bool odd = lane & 4;
  m += 2 * (lane % 4) + odd;
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const int row = n + 8 * h + lane / 4;
    const float v0 = h ? gated(gate.z, up.z) : gated(gate.x, up.x), v1 = h ? gated(gate.w, up.w) : gated(gate.y, up.y);
    if (ORDERED) {
      if (row < p.N / 2) store_interleaved(p, p.out, m - odd, beside.places[h], pack2(v0, v1));
      continue;
    }
    const float other = __shfl_xor_sync(~0u, odd ? v0 : v1, 4);
    const u32 word = odd ? pack2(other, v1) : pack2(v0, other);
    if (m < p.M && row < p.N / 2) *(u32*)(p.out + (long long)m * (p.N / 2) + (row & ~1)) = word;
  }
}

// Output `i` of those that warp `warp` multiplied: its first token and channel.
__device__ __forceinline__ int2 place_of(const Problem& p, int tile, int warp, int i) {
  const int block = tile / p.tiles_m * (TILES / PARTS) + warp / 4 * (SUB / PARTS) + i / (BM / 8);
  return make_int2(tile % p.tiles_m * BM + i % (BM / 8) * 8, block * 64 + warp % 4 * 16);
}

// That output from the sums of its parts.
__device__ __forceinline__ void end_piece(const Problem& p, int2 place, int i, const char* smem, const Beside& beside,
                                          float4 (&v)[PARTS]) {
  if (NORMED) {
    const float2 factor = ((const float2*)(smem + FACTORS_AT))[i % (BM / 8) * 4 + threadIdx.x % 4];
#pragma unroll
    for (int j = 0; j < PARTS; j++)
      v[j] = make_float4(v[j].x * factor.x, v[j].y * factor.y, v[j].z * factor.x, v[j].w * factor.y);
  }
  if (GATED)
    gate_block(p, v[0], v[PARTS - 1], beside, place.x, place.y);
  else if (ADDS)
    add_block(p, v[0], beside, place.x, place.y);
  else
    store_block(v[0], p.bias, p.out, place.x, place.y, p.M, p.N);
}

__device__ __forceinline__ float4 piece_of(const float (&acc)[SUB][BM / 2], int piece) {
  const float* v = &acc[piece / (BM / 8)][piece % (BM / 8) * 4];
  return make_float4(v[0], v[1], v[2], v[3]);
}
__device__ __forceinline__ void set_piece(float (&acc)[SUB][BM / 2], int piece, float4 v) {
  float* at = &acc[piece / (BM / 8)][piece % (BM / 8) * 4];
  at[0] = v.x;
  at[1] = v.y;
  at[2] = v.z;
  at[3] = v.w;
}

// Of the sums of a thread, part `part` of output `i`.
__device__ __forceinline__ float4 part_of_output(const float (&acc)[SUB][BM / 2], int i, int part) {
  return piece_of(acc, part * OUTPUTS + i);
}

