// y[M, N] = x[M, K] W^T for packed 4-bit W and 64 tokens or so, on a matrix unit of compute capability 9.0
// (w4a16_gemm.py).
//
// Tokens are the rows of `wgmma`, rows of W the columns: D [64, n] += x [64, 16] W^T [16, n], both from shared memory.
// Compile-time constants: GROUP columns (0: one group a row); SYMMETRIC; BF16 (else fp16);
//   WGS     warpgroups, 2 or 3, of which each unpacks 64 rows of W      MB     blocks of 64 tokens: as many multiply
//   KS      columns of a stage, 64 or 128                               SPLIT  programs of a cluster, which share K
//   STAGES  stages of packed words, scales and x                        ALIAS  sums land in the stages: room for more of
//                                                                  them, but all programs wait for each other

#include "unpack.cuh"

constexpr int THREADS = 128 * WGS, ROWS = 64 * WGS, MT = 64 * MB, DEPTH = KS / KB;
constexpr int FOLD = GROUP && GROUP < KS ? GROUP : KS, FOLDS = KS / FOLD;  // columns that share a scale
// A stage: x as wgmma wants it, in rows of 64 columns whose 16-byte pieces are in the order piece ^ row % 8; words;
// scales.
constexpr int WORDS = MT * KS * 2, SCALES = WORDS + ROWS * KS / 2, SCALE_BYTES = sizeof(Scales) * 8 * FOLDS;
constexpr int STAGE = (SCALES + ROWS / 16 * SCALE_BYTES + 1023) / 1024 * 1024;
constexpr int BUFFER = ROWS * KS * 2, BUFFERS = 2, BEHIND = STAGES * STAGE + BUFFERS * BUFFER;  // of unpacked weights
// Sums of 16 tokens and 8 rows, a unit, go to one of the SPLIT programs, which adds them up in a fixed order.
constexpr int UNITS = MT / 16 * ROWS / 8, SLOTS = (UNITS + SPLIT - 1) / SPLIT;
constexpr int LANDING = SPLIT > 1 && !ALIAS ? BEHIND : 0, SUMS = LANDING + SPLIT * SLOTS * 512,
              LANDED = SUMS > BEHIND ? SUMS : BEHIND;
static_assert(MB <= WGS && STAGES > BUFFERS && KS % KB == 0 && KS % FOLD == 0 && (GROUP == 0 || GROUP % FOLD == 0),
              "a stage does not divide, or there are too few");

extern "C" __global__ void
#if SPLIT > 1
__cluster_dims__(SPLIT)
#endif
    __launch_bounds__(THREADS, 1)
        gemm(const u16* x, const uint4* codes, const Scales* scales, u16* y, int M, int N, int K, int groups) {
    extern __shared__ __align__(1024) char shared[];
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const int rank = blockIdx.x % SPLIT, token_tiles = (M + MT - 1) / MT, place = blockIdx.x / SPLIT;
    const int m0 = place % token_tiles * MT, n0 = place / token_tiles * ROWS;  // neighbours share weights
    const int tiles = (N + 15) / 16, blocks = (K + KB - 1) / KB, slabs = (K + KS - 1) / KS;
    const int begin = slabs * rank / SPLIT, end = slabs * (rank + 1) / SPLIT;  // stages of this program: one at least
    const int tile = n0 / 16 + warp;                                           // that this warp copies and unpacks
    const u32 stages = shared_address(shared), buffers = stages + STAGES * STAGE, landing = stages + LANDING;
    const u32 landed = stages + LANDED;
    if (SPLIT > 1) {
        if (threadIdx.x == 0) expect_bytes(landed, (UNITS - rank + SPLIT - 1) / SPLIT * SPLIT * 512);
        if (!ALIAS) cluster_arrive();
    }

    const u64 policy = token_tiles == 1 ? evict_first() : evict_normal();  // are weights read by one program?
    auto copy_stage = [&](int to, int slot) {                              // past the end of x or W are zeros
        const u32 at = stages + slot * STAGE;
        const int first = to * KS;
        if (to < end) {
            UNROLL for (int d = 0; d < DEPTH; d++) copy_once(at + WORDS + (warp * DEPTH + d) * 512 + lane * 16,
                                                             codes + (tile * blocks + first / KB + d) * 32 + lane,
                                                             policy, true, tile >= tiles || first / KB + d >= blocks);
            UNROLL for (int f = 0; f < FOLDS; f++) {
                const int group = GROUP ? (first + f * FOLD) / max(GROUP, 1) : 0;
                if (t == 0)
                    copy_few<sizeof(Scales)>(at + SCALES + warp * SCALE_BYTES + (f * 8 + g) * sizeof(Scales),
                                             scales + (tile * groups + group) * 8 + g,
                                             tile >= tiles || group >= groups);
            }
            UNROLL for (int p = 0; p < MT * KS / 8; p += THREADS) {
                const int piece = p + threadIdx.x, token = piece / 8 % MT,
                          column = first + piece / 8 / MT * 64 + piece % 8 * 8;
                if (p + THREADS <= MT * KS / 8 || piece < MT * KS / 8)
                    copy_past_l1(at + piece / 8 * 128 + (piece ^ token) % 8 * 16, x + (u64)(m0 + token) * K + column,
                                 m0 + token >= M || column >= K);
            }
        }
        end_of_copies();
    };
    uint4 words[DEPTH];
    Scales scaling[FOLDS];
    auto read = [&](int slot) {  // this warp's share of a stage
        const u32 at = stages + slot * STAGE;
        __syncwarp();
        UNROLL for (int d = 0; d < DEPTH; d++) words[d] = load16(at + WORDS + (warp * DEPTH + d) * 512 + lane * 16);
        UNROLL for (int f = 0; f < FOLDS; f++)
            load_few(scaling[f].rows, at + SCALES + warp * SCALE_BYTES + (f * 8 + g) * sizeof(Scales));
    };
    // Of two steps a lane has 8 neighbouring columns of rows g and g + 8: a 16-byte piece each. Row g of 8 lies at
    // place g / 2 + g % 2 * 4: eight lanes that store rows g and g + 1 meet all 32 banks.
    const u32 spot = g / 2 + g % 2 * 4;
    auto unpack_stage = [&](int buffer) {
        UNROLL for (int half = 0; half < 2; half++) UNROLL for (int column = 0; column < KS; column += 32) {
            const Factors f = factors(scaling[column / FOLD], half);
            const u32* word = &words[column / KB].x + column % KB / 16;
            uint4 piece;
            UNROLL for (int j = 0; j < 4; j++)(&piece.x)[j] =
                unpack(word[j / 2], j % 2 * 2 + half, f);
            const u32 row = column / 64 * ROWS + warp * 16 + half * 8 + spot;
            store16(buffers + buffer * BUFFER + row * 128 + (column % 64 / 8 + t ^ spot) * 16, piece);
        }
    };

    UNROLL for (int i = 0; i < STAGES - 1; i++) copy_stage(begin + i, i);
    wait_for_copies<STAGES - 2>();
    read(0), unpack_stage(0);
    wait_for_copies<STAGES - 3>();
    read(1);

    // While the matrix unit works on one stage, all unpack the next. Those that multiply have a loop of their own: the
    // compiler lets products run on only where nothing branches around them.
    const int group = MB == 1 ? 0 : warp / 4;  // 0: known to be the same in all lanes
    auto run = [&](bool multiplies) __attribute__((always_inline)) {
        float sum[ROWS / 8][4] = {};
        int slab = begin, i = 0, buffer = 0;
        do {
            show_matrix_unit();
            if (multiplies) wgmma_wait<0>();  // the other buffer and the stage before are free
            barrier(1, THREADS);
            if (multiplies) {
                const u32 left = (stages + i * STAGE + group * 8192) / 16;
                const u32 right = (buffers + buffer * BUFFER) / 16;
                wgmma_begin();
                UNROLL for (int k = 0; k < KS; k += 16)
                    wgmma<BF16, ROWS>(sum, left + k / 64 * MT * 8 + k % 64 / 8, right + k / 64 * ROWS * 8 + k % 64 / 8);
                wgmma_end();
            }
            copy_stage(slab + STAGES - 1, i == 0 ? STAGES - 1 : i - 1);
            buffer ^= 1;
            if (slab + 1 < end) unpack_stage(buffer);
            wait_for_copies<STAGES - 3>();
            read(i + 2 < STAGES ? i + 2 : i + 2 - STAGES);
            i = i + 1 == STAGES ? 0 : i + 1;
        } while (++slab < end);
        if (multiplies) wgmma_wait<0>();
        wait_for_copies<0>();
        if (SPLIT == 1) barrier(1, THREADS);  // all have done
        else if (ALIAS) cluster_barrier();
        else cluster_wait();  // all have begun
        if (multiplies) {
            UNROLL for (int n = 0; n < ROWS / 8; n++) {
                const u32 unit = (group * 4 + warp % 4) * (ROWS / 8) + n;
                const u32 to = landing + (rank * SLOTS + unit / SPLIT) * 512 + lane * 16;
                const float4 v = {sum[n][0], sum[n][1], sum[n][2], sum[n][3]};
                if (SPLIT > 1) send(to, v, landed, unit % SPLIT);
                else store16(to, v);
            }
        }
    };
    if ((int)warp < 4 * MB) run(true);
    else run(false);
    if (SPLIT > 1) wait_for_bytes(landed);
    else __syncthreads();
    for (u32 slot = warp; slot * SPLIT + rank < UNITS; slot += 4 * WGS) {
        const u32 unit = slot * SPLIT + rank;
        uint4 parts[SPLIT];
        float total[4] = {};
        UNROLL for (int k = 0; k < SPLIT; k++) parts[k] = load16(landing + (k * SLOTS + slot) * 512 + lane * 16);
        UNROLL for (int v = 0; v < SPLIT * 4; v++) total[v % 4] += __uint_as_float((&parts[v / 4].x)[v % 4]);
        // Places 2 t and 2 t + 1: rows 0 2, 4 6, 1 3, 5 7 of lanes t = 0 to 3; lanes t and t ^ 2 make neighbours of
        // them.
        const int row = n0 + unit % (ROWS / 8) * 8 + t % 2 * 4 + t / 2 * 2;
        UNROLL for (int half = 0; half < 2; half++) {
            const u32 mine = to_halves<BF16>(total[2 * half], total[2 * half + 1]),
                      other = __shfl_xor_sync(~0u, mine, 2);
            const u32 pair = __byte_perm(mine, other, t < 2 ? 0x5410 : 0x3276);
            const int token = m0 + unit / (ROWS / 8) * 16 + half * 8 + g, left = token < M ? N - row : 0;
            u16* to = y + (u64)token * N + row;
            if (left > 1 && N % 2 == 0) *(u32*)to = pair;
            else if (left > 0) {
                to[0] = pair;
                if (left > 1) to[1] = pair >> 16;
            }
        }
    }
}
