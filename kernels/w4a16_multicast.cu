// y[M, N] = x[M, K] W^T for packed low-bit W and 65 tokens or more, with the `wgmma` instruction of the tensor cores of
// compute capability 9.0 and x copied by tensor maps (w4a16_gemm.py).
//
// Rows of W are the rows of `wgmma`: D [64, MT] += W [64, 16] x^T [16, MT], W unpacked in registers, once for up to 352
// tokens, and x in shared memory. One thread copies x, every warp copies, unpacks and multiplies 16 rows of W. With
// PRODUCER that thread has a warpgroup to itself, which leaves most of its registers to the others; without it is one of
// those that multiply, and between two products it copies what half of the stages wait for: 128 registers for each of
// four warpgroups, the sums of 160 tokens. PAIR thread blocks of a cluster have the same tokens, and each copies a part
// of them to all. There is no block-wide barrier in the main loop: each stage of x has two mbarriers, for full and for
// free.
//
// Compile-time constants: BITS, GROUP columns (0: one group per row), SYMMETRIC, BF16 (unpack.cuh);
//   WGS     warpgroups that unpack and multiply, 2 to 4, 64 rows each
//   MT      tokens of a tile, a multiple of 8 PAIR     STAGES  stages of 64 columns of x in shared memory
//   RING    stages of 128 columns of packed words, per warp that unpacks
//   SPLIT   thread blocks of a cluster that split K    PAIR    those with the same columns of x; CLUSTER is all of them
//   COLUMNS K, if nothing ends within a tile or a stage        PRODUCER  1: a warpgroup of its own copies x

#include "beside.cuh"
#include "unpack.cuh"

constexpr int KS = 128, STEP = 64;             // columns of a stage of W, and of x
// Registers of a thread with PRODUCER: the block is launched with 168, 128 or 96 for each (WGS 2, 3, 4).
constexpr int FEWER = WGS > 2 || MT > 336 ? 24 : 40, MORE = WGS == 4 ? 112 : WGS == 3 ? 160 : MT > 336 ? 240 : 232;
// Columns that are unpacked and multiplied at a time: as many as leave registers for the sums.
constexpr int MOST_OF_WHOLE_STEPS = WGS == 2 ? 352 : WGS == 3 ? 160 : PRODUCER ? 0 : 112;  // tokens
constexpr int PART = MT <= MOST_OF_WHOLE_STEPS ? STEP : 32;
static_assert(PRODUCER || STAGES > 1, "a stage is copied while another is read");
constexpr int BEHIND = STAGES / 2;             // stages after which a thread that multiplies copies into one again
constexpr int WARPS = 4 * WGS, NT = MT / 8, ROWS = 16 * WARPS, DEPTH = KS / KB;
constexpr int FOLD = GROUP && GROUP < KS ? GROUP : KS, FOLDS = KS / FOLD;  // columns that share a scale
constexpr int X = MT * STEP * 2, FOLD_BYTES = sizeof(Scales) * 8, W = DEPTH * 512 + FOLDS * FOLD_BYTES;  // of one stage
constexpr int UNITS = WARPS * NT, SLOTS = (UNITS + SPLIT - 1) / SPLIT;
constexpr int WORDS = STAGES * X, STAGED = WORDS + RING * WARPS * W, LANDED = SPLIT * SLOTS * 512;
constexpr int MBARRIERS = LANDED > STAGED ? LANDED : STAGED;
constexpr int HELD = PART / 8;                      // words that a lane reads for a part, two registers of A each
constexpr int BOXES = MT > 256 && PAIR == 1 ? 2 : 1, BOX = MT / PAIR / BOXES;  // a box has at most 256 rows
constexpr int TOGETHER = ((1 << CLUSTER) - 1) / ((1 << SPLIT) - 1);  // blocks 0, SPLIT, ...

#include "turns.cuh"

// Stages of W of unrolled code; two stages of x have the columns of one.
constexpr int TURN = stages_of_turn(RING, STAGES % 2 ? STAGES : STAGES / 2, 6);

#include "joined_sums.cuh"

extern "C" __global__ void
#if CLUSTER > 1
__cluster_dims__(CLUSTER)
#endif
    __launch_bounds__(32 * WARPS + 128 * PRODUCER, 1)
        gemm(const __grid_constant__ TensorMap x, const uint4* codes, const Scales* scales, u16* y, int M, int N,
             int columns_of_x, int all_groups) {
    extern __shared__ __align__(1024) char shared[];
#if COLUMNS
    constexpr int K = COLUMNS, groups = GROUP ? K / (GROUP + !GROUP) : 1;
#else
    const int K = columns_of_x, groups = all_groups;
#endif
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const int member = blockIdx.x % CLUSTER, rank = member % SPLIT, half = member / SPLIT, cluster = blockIdx.x / CLUSTER;
    const int token_tiles = (M + MT - 1) / MT;
    const int m0 = M > MT ? cluster % token_tiles * MT : 0;
    const int n0 = ((M > MT ? cluster / token_tiles : cluster) * PAIR + half) * ROWS;
    const int slabs = (K + KS - 1) / KS;
    // This block's stages, at least one: of all, or counted from its own first.
    const Stage slabs_before = slabs * rank / SPLIT, slabs_with = slabs * (rank + 1) / SPLIT;
    const Stage begin = EVEN ? 0 : slabs_before;
    const Stage end = EVEN ? (SLABS % SPLIT ? slabs_with - slabs_before : LEAST) : slabs_with;
    const int own = EVEN ? slabs_before * KS : 0;  // columns before that first one
    const u32 stages = shared_address(shared), landing = stages, full = stages + MBARRIERS;
    const u32 free = full + STAGES * 8, landed = free + STAGES * 8;
    let_tail_begin();
    if (threadIdx.x == 0) {
        UNROLL for (int i = 0; i < STAGES; i++) signal_init(full + i * 8, 1), signal_init(free + i * 8, WARPS * PAIR);
        if (SPLIT > 1) expect_bytes(landed, (UNITS - rank + SPLIT - 1) / SPLIT * (SPLIT - 1) * 512);
        show_signals();
    }
    const bool is_producer = warp >= WARPS;
    const int tiles = (N + 15) / 16;
    const u32 tile = n0 / 16 + warp, blocks = (K + KB - 1) / KB;
    const uint4* const words_from = codes + (tile * blocks + own / KB) * 32 + lane;
    const int own_group = GROUP ? own / (GROUP + !GROUP) : 0;
    const Scales* const scales_from = scales + (tile * groups + own_group) * 8 + g;
    const u32 last = tile < tiles ? blocks : 0, last_group = tile < tiles ? groups : 0;  // past them, zeros
    const u32 ring = stages + WORDS + warp * W;
    const u64 policy = token_tiles == 1 && !READ_AGAIN ? evict_first() : evict_normal();  // only one block reads these weights?
    // Of rows past the end any words are right: nobody stores their sums.
    const Stage last_copied = EVEN && (int)tile >= tiles ? 0 : end;
    auto copy_stage = [&](Stage slab, int j) {
        const u32 to = ring + j * WARPS * W;
        const bool there = slab < last_copied;
        if (EVEN || there) {
            UNROLL for (int d = 0; d < DEPTH; d++)
                copy_once(to + d * 512 + t * 128 + (g * 16 ^ t * 32), words_from + (slab * DEPTH + d) * 32, policy,
                          !EVEN || there, !EVEN && slab * DEPTH + d >= last);
            UNROLL for (int f = 0; f < FOLDS; f++) {
                const Stage first = slab * KS + f * FOLD;
                const Stage group = EVEN && GROUP == FOLD ? slab * FOLDS + f : GROUP ? first / max(GROUP, 1) : 0;
                copy_few<sizeof(Scales)>(to + DEPTH * 512 + f * FOLD_BYTES + g * sizeof(Scales),
                                         scales_from + group * 8, t == 0 && (!EVEN || there),
                                         !EVEN && group >= last_group);
            }
        }
        end_of_copies();
    };
    if (!is_producer) UNROLL for (int j = 0; j < RING - 1; j++) copy_stage(begin + j, j);
    __syncthreads();
    if (CLUSTER > 1) cluster_arrive(), cluster_wait();  // every block has initialized its mbarriers

    auto copy_x = [&](Stage column, int i) {  // this block's part of the tokens into stage i, which is free
        signal_expect(full + i * 8, X);
        const u32 to = stages + i * X + half * BOX * 128;
        if (PAIR == 1) UNROLL for (int b = 0; b < BOXES; b++) copy_box(to + b * BOX * 128, &x, own + column, m0 + b * BOX, full + i * 8);
        else copy_box(to, &x, own + column, m0 + half * BOX, full + i * 8, TOGETHER << rank);
    };
    if (PRODUCER && is_producer) {
        fewer_registers<FEWER>();
        if (threadIdx.x == 32 * WARPS) {
            int i = 0, phase = 0;
            for (Stage column = begin * KS; column < end * KS; column += STEP) {
                signal_wait(free + i * 8, phase - 1);  // in phase 0 every stage is free
                copy_x(column, i);
                if (++i == STAGES) i = 0, phase++;
            }
        }
#if CLUSTER > 1
        __syncwarp();
        cluster_arrive();
#endif
    } else {
        const bool copies_x = !PRODUCER && warp == 0;  // one of its lanes; all of them wait for a stage to be free
        if (PRODUCER) more_registers<MORE>();
        else if (threadIdx.x == 0) {
            Stage column = begin * KS;
            for (int i = 0; i < STAGES && column < end * KS; i++, column += STEP) copy_x(column, i);
        }
        u32 held[HELD];
        Scales scaling[FOLDS];
        // A lane of `wgmma` has columns 2 t, 2 t + 1 of each eight, a lane's packed words (packing.py) eight neighbouring
        // ones of each 32: lane t reads field t of the words of its quad's four lanes. Their 16 bytes are stored so that
        // neither eight lanes that copy nor all that read meet in a bank.
        const u32 word = 2 * t / PER_WORD * 4, shift = 2 * t % PER_WORD * BITS;
        u32 mine[4];
        UNROLL for (int n = 0; n < 4; n++) mine[n] = ring + n * 128 + (g * 16 ^ n * 32) + word;
        auto read_words = [&](int j, int column) {  // of a part
            UNROLL for (int n = 0; n < HELD; n++) {
                const int block = column / 32 + n / 4, of = block * 32 / KB, first = block * 32 % KB * 4 / KB;
                held[n] = load_word(mine[n % 4] + j * WARPS * W + of * 512 + first * 4) >> shift;
            }
        };
        auto wait_for_stage = [&](int j) {
            wait_for_copies<RING - 2>();
            __syncwarp();
            UNROLL for (int f = 0; f < FOLDS; f++)
                load_few(scaling[f].rows, ring + j * WARPS * W + DEPTH * 512 + f * FOLD_BYTES + g * sizeof(Scales));
        };
        float sum[NT][4] = {};
        u32 a[2][PART / 4];
        int i = 0, phase = 0, j = 0, before = -1;
        wait_for_stage(0);
        read_words(0, 0);
        for (Stage first = begin; first < end; first += TURN) UNROLL for (int u = 0; u < TURN; u++) {
            const Stage slab = first + u;
            if (may_end(u, TURN) && slab >= end) break;
            if (TURN > 1) {
                i = 2 * u % STAGES, j = u % RING;
                before = slab > 0 ? (i == 0 ? STAGES : i) - 1 : -1;
            }
            copy_stage(slab + RING - 1, j == 0 ? RING - 1 : j - 1);
            UNROLL for (int column = 0; column < KS; column += PART) {
                auto& now = a[column / PART % 2];
                UNROLL for (int v = 0; v < PART / 4; v++) now[v] =
                    unpack(held[v / 2], v % 2, factors(scaling[(column + v / 4 * 16) / FOLD], v % 2));
                if (column + PART == KS) {
                    if (++j == RING) j = 0;
                    wait_for_stage(j);
                }
                read_words(j, (column + PART) % KS);
                if (column % STEP == 0) signal_wait(full + i * 8, phase);
                wgmma_begin();
                UNROLL for (int k = 0; k < PART; k += 16) {
                    multiply_tile(sum, now + k / 4, matrix(stages + i * X) + (column % STEP + k) / 8);
                }
                wgmma_end();
                wgmma_wait<1>();  // the previous part's: its `a` and, at the first of a stage, the stage before are free
                if (column % STEP == 0 && before >= 0) {
                    if (PAIR == 1) { if (lane == 0) signal_arrive(free + before * 8); }
                    else if (lane < PAIR) signal_arrive(free + before * 8, lane * SPLIT + rank);
                }
                if (column % STEP == 0 && copies_x) {  // into the stage that was read BEHIND stages ago
                    const Stage read = slab * KS + column, next = read + (STAGES - BEHIND) * STEP;
                    if (read >= begin * KS + BEHIND * STEP && next < end * KS) {
                        const int stage = i < BEHIND ? i + STAGES - BEHIND : i - BEHIND;
                        signal_wait(free + stage * 8, i < BEHIND ? phase - 1 : phase);
                        if (lane == 0) copy_x(next, stage);
                    }
                }
                if ((column + PART) % STEP == 0) {
                    before = i;
                    if (++i == STAGES) i = 0, phase++;
                }
            }
        }
        wgmma_wait<0>();
        wait_for_copies<0>();
#if CLUSTER > 1
        cluster_arrive(), cluster_wait();  // every warp of the cluster has read its stages
#else
        barrier(1, 32 * WARPS);
#endif
        land_sums(sum, landing, landed, rank, half * SPLIT, warp, lane);
        barrier(1, 32 * WARPS);
        if (SPLIT > 1) wait_for_bytes(landed);
        store_sums(y, landing, rank, warp, WARPS, lane, m0, n0, M, N);
    }
}
