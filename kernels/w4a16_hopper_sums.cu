// Sums over the programs of a tile. Parts are added in the order of the programs, so a result does not depend on
// timing.
constexpr int SUMS = (OUTPUTS * WARPS + CLUSTER - 1) / CLUSTER;  // of a warp's piece, made by a program of a cluster
constexpr int TOGETHER = BURST > 0 ? 1 : 4;  // programs whose few pieces are read at once

__device__ __forceinline__ void add(float4& sum, float4 v) {
  sum.x += v.x;
  sum.y += v.y;
  sum.z += v.z;
  sum.w += v.w;
}
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// The programs of a cluster have one tile and run at the same time: each adds its share of the pieces, which the others
// send to its shared memory.
__device__ __forceinline__ void sum_cluster(const Problem& p, int tile, char* smem, const float (&acc)[SUB][BM / 2]) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, rank = blockIdx.x % CLUSTER;
  const u32 parts = shared_address(smem + PARTS_AT) + lane * 16;  // [SUMS, CLUSTER, PARTS, 32] float4
  if (BURST > 0) asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");  // all have started; of many tokens: multiplied
#pragma unroll
  for (int i = 0; i < OUTPUTS; i++) {
    const int q = i * WARPS + warp;
    u32 to;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(to) : "r"(parts + (q / CLUSTER * CLUSTER + rank) * PARTS * 512),
        "r"(q % CLUSTER));
#pragma unroll
    for (int j = 0; j < PARTS; j++) {
      const float4 v = part_of_output(acc, i, j);
      asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to + j * 512), "f"(v.x), "f"(v.y),
                   "f"(v.z), "f"(v.w) : "memory");
    }
  }
  Beside beside = {};
  int2 place = place_of(p, tile, (warp * CLUSTER + rank) % WARPS, (warp * CLUSTER + rank) / WARPS);
  if ((ADDS || ORDERED) && warp < SUMS) beside = beside_of(p, place.x, place.y);  // on its way while parts are sent
  cluster_sync();
  for (int slot = warp; slot < SUMS; slot += WARPS) {
    const int q = slot * CLUSTER + rank;
    if (q >= OUTPUTS * WARPS) break;
    if (slot != warp) {
      place = place_of(p, tile, q % WARPS, q / WARPS);
      if (ADDS || ORDERED) beside = beside_of(p, place.x, place.y);
    }
    float4 sum[PARTS];
#pragma unroll
    for (int j = 0; j < PARTS; j++) sum[j] = make_float4(0, 0, 0, 0);
#pragma unroll
    for (int r = 0; r < CLUSTER; r++)
#pragma unroll
      for (int j = 0; j < PARTS; j++) {
        float4 v;
        asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                     : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                     : "r"(parts + ((slot * CLUSTER + r) * PARTS + j) * 512));
        add(sum[j], v);
      }
    end_piece(p, place, q / WARPS, smem, beside, sum);
  }
}

// Who brings units passes both barriers, too: each thread arrives at one and waits there before it arrives at the next.
__device__ __forceinline__ void pass_cluster() {
  if (CLUSTER == 1) return;
  __syncwarp();
  if (BURST > 0) asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
  cluster_sync();
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
__device__ __forceinline__ bool arrive_last(const Problem& p, int first, int others, bool begins, char* smem,
                                            const float (&acc)[SUB][BM / 2], bool& has_own) {
  int* counter = p.counters + first * WARPGROUPS + threadIdx.x / 128;
  volatile int* told = (volatile int*)(smem + TOLD_AT) + threadIdx.x / 128;
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
__device__ __forceinline__ void sum_tile(const Problem& p, int tile, int k_begin, char* smem,
                                         float (&acc)[SUB][BM / 2]) {
  const int first = program_of(tile * p.steps, p.units), last = program_of(tile * p.steps + p.steps - 1, p.units);
  bool has_own = true;
  if (first < last && !arrive_last(p, first, last - first, k_begin == 0, smem, acc, has_own)) return;
  Beside beside[OUTPUTS] = {};  // on its way while parts are added
  if (ADDS || ORDERED)
#pragma unroll
    for (int i = 0; i < OUTPUTS; i++) {
      const int2 place = place_of(p, tile, threadIdx.x / 32, i);
      beside[i] = beside_of(p, place.x, place.y);
    }
  if (!has_own)
#pragma unroll
    for (int i = 0; i < PIECES; i++) set_piece(acc, i, __ldcg(part_of(p, first, true) + i * 128));
#pragma unroll TOGETHER
  for (int program = first + 1; program <= last; program++)
#pragma unroll
    for (int i = 0; i < PIECES; i++) {
      float4 sum = piece_of(acc, i);
      add(sum, __ldcg(part_of(p, program, false) + i * 128));
      set_piece(acc, i, sum);
    }
#pragma unroll
  for (int i = 0; i < OUTPUTS; i++) {
    float4 sum[PARTS];
#pragma unroll
    for (int j = 0; j < PARTS; j++) sum[j] = part_of_output(acc, i, j);
    end_piece(p, place_of(p, tile, threadIdx.x / 32, i), i, smem, beside[i], sum);
  }
}
