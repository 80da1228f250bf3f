// y[M, N] = x[M, K] W^T for packed low-bit W and about 64 tokens, with the `wgmma` instruction of the tensor cores of
// compute capability 9.0 (w4a16_gemm.py).
//
// Rows of W are the rows of `wgmma`: D [64, MT] += W [64, 16] x^T [16, MT], W unpacked in registers, x in shared
// memory. Four producer warps load x; every other warp copies, unpacks and multiplies 16 rows of W. There is no block-wide
// barrier in the main loop: each stage of x has two mbarriers, for full and for free.
//
// Compile-time constants: BITS, GROUP columns (0: one group per row), SYMMETRIC, BF16 (unpack.cuh);
//   WGS     consumer warpgroups, 64 rows each         MT      tokens of a tile, a multiple of 8
//   KS      columns of a stage                        SPLIT   thread blocks of a cluster, which split K
//   STAGES  stages of x in shared memory              RING    stages of packed words and scales, per consumer warp
//   SCALED  1: a group's scale multiplies the weights; 0: its sums, if a step of columns has one scale
//   OVERLAID 1: sums lie where stages did, when all blocks of the cluster have read theirs; 0: they have a place of their own
//   COLUMNS K, if nothing ends within a tile or a stage

#include "beside.cuh"
#include "unpack.cuh"

constexpr int WARPS = 4 * WGS, NT = MT / 8, ROWS = 64 * WGS, DEPTH = KS / KB;
constexpr int LOADED = (MT + 15) / 16;  // tokens that a producer lane loads, at most
constexpr int AHEAD = (WGS > 2 && LOADED * KS > 512) || (KS == 256 && LOADED > 5) ? 1 : 2;  // stages that a producer lane holds
constexpr int FOLD = GROUP && GROUP < KS ? GROUP : KS, FOLDS = KS / FOLD;  // columns that share a scale
constexpr int X = MT * KS * 2, FOLD_BYTES = sizeof(Scales) * 8, W = DEPTH * 512 + FOLDS * FOLD_BYTES;  // of one stage
// A unit is the sums of 16 rows and 8 tokens; one of the SPLIT thread blocks adds up each unit, in a fixed order.
constexpr int UNITS = WARPS * NT, SLOTS = (UNITS + SPLIT - 1) / SPLIT;
constexpr int WORDS = STAGES * X, STAGED = WORDS + RING * WARPS * W, LANDED = SPLIT * SLOTS * 512;
constexpr int LANDING = OVERLAID ? 0 : STAGED;
constexpr int MBARRIERS = LANDING + LANDED > STAGED ? LANDING + LANDED : STAGED;
static_assert(STAGES > 1 && RING > 1 && MT % 8 == 0 && KS % KB == 0 && KS % 64 == 0 && KS % FOLD == 0 &&
                  (GROUP == 0 || GROUP % FOLD == 0),
              "a stage does not divide, or there are too few");

#include "turns.cuh"

constexpr int TURN = stages_of_turn(STAGES, RING, 8);  // of unrolled code
// The same of what producers run: a turn of the stages of x, or as many stages as a lane holds.
constexpr bool X_IN_TURNS = stages_of_turn(STAGES, AHEAD, 12) > 1;
constexpr int TURN_OF_X = X_IN_TURNS ? stages_of_turn(STAGES, AHEAD, 12) : AHEAD;
// Of two groups by turns products have registers of their own: the tensor cores work on one while the sums of the other are
// scaled. ptxas follows that within a turn of an unrolled loop, which has to be an even number of groups.
// How many tokens there are registers for:
constexpr int MOST_BY_TURNS = WGS == 1 ? 64 : WGS == 2 ? (KS > 128 ? 40 : 48) : WGS == 3 ? 40 : 24;
constexpr bool BY_TURNS = !SCALED && FOLD % 64 == 0 && TURN > 1 && TURN * FOLDS % 2 == 0 && MT <= MOST_BY_TURNS;
constexpr int PARTS = BY_TURNS ? 2 : 1;
// Five warpgroups have 96 registers; of few tokens, producers need no more than 64 and leave the others 104. Not without an
// unrolled loop, where ptxas 13.0 then puts a shared address into a uniform register beside a cache policy: no device runs that.
constexpr bool UNEVEN = TURN > 1 && WGS == 4 && MT <= 48;
// Columns per unpack and multiply, and how many of them have registers of their own: fewer beside many sums.
constexpr bool NARROW = WGS > 3 && MT > 64;
constexpr int STEP = BY_TURNS && WGS < 3 && MT <= 32 && FOLD < 256 ? FOLD : KS >= 128 && !NARROW ? 64 : 32;
constexpr int BUFFERS = BY_TURNS || NARROW ? 2 : KS / STEP;
constexpr bool SUMS_SCALED = !SCALED && FOLD % STEP == 0;

#include "joined_sums.cuh"

// x is stored in the layout of `wgmma`, rows of 64 columns, and passes through registers: packing.py puts two of eight
// neighbouring columns in each half of two k-steps, so each 8-column half takes columns from four lanes.
struct Share {  // of a stage, what one producer lane loads: 8 of every 64 columns, of every 16th token
    uint4 v[LOADED][KS / 64];
};
// Whether a warp loads tokens 16 j to 16 j + 15: two of the four do where the tile has only half of them.
INLINE constexpr bool loads(int j, bool loads_half) { return 16 * j + 16 <= MT || loads_half; }
INLINE void fetch(Share& to, const u16* const (&row)[LOADED], int first, int columns, bool loads_half) {
    UNROLL for (int j = 0; j < LOADED; j++) {
        if (!loads(j, loads_half)) continue;
        UNROLL for (int c = 0; c < KS; c += 64)
            to.v[j][c / 64] = EVEN || c < columns ? load_early(row[j] + first + c) : uint4{0, 0, 0, 0};
    }
}
INLINE void put(u32 to, const Share& from, bool loads_half) {
    UNROLL for (int j = 0; j < LOADED; j++) {
        if (!loads(j, loads_half)) continue;
        UNROLL for (int c = 0; c < KS / 64; c++) store_matrices(to + c * MT * 128 + j * 2048, from.v[j][c]);
    }
}

extern "C" __global__ void
#if SPLIT > 1
__cluster_dims__(SPLIT)
#endif
    __launch_bounds__(32 * WARPS + 128, 1)
        gemm(const u16* x, const uint4* codes, const Scales* scales, u16* y, int M, int N, int columns_of_x,
             int all_groups) {
    extern __shared__ __align__(1024) char shared[];
#if COLUMNS
    constexpr int K = COLUMNS, groups = GROUP ? K / (GROUP + !GROUP) : 1;
#else
    const int K = columns_of_x, groups = all_groups;
#endif
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const int rank = blockIdx.x % SPLIT, cluster = blockIdx.x / SPLIT, token_tiles = (M + MT - 1) / MT;
    const int m0 = M > MT ? cluster % token_tiles * MT : 0, n0 = (M > MT ? cluster / token_tiles : cluster) * ROWS;
    const int slabs = (K + KS - 1) / KS;
    // This block's stages, at least one: of all, or counted from its own first.
    const int slabs_before = slabs * rank / SPLIT, slabs_with = slabs * (rank + 1) / SPLIT;
    const int begin = EVEN ? 0 : slabs_before;
    const int end = EVEN ? (SLABS % SPLIT ? slabs_with - slabs_before : LEAST) : slabs_with;
    const int own = EVEN ? slabs_before * KS : 0;  // columns before that first one
    const u32 stages = shared_address(shared), landing = stages + LANDING, full = stages + MBARRIERS;
    const u32 free = full + STAGES * 8, landed = free + STAGES * 8;
    let_tail_begin();
    if (threadIdx.x == 0) {
        UNROLL for (int i = 0; i < STAGES; i++) signal_init(full + i * 8, 4), signal_init(free + i * 8, WARPS);
        if (SPLIT > 1) expect_bytes(landed, (UNITS - rank + SPLIT - 1) / SPLIT * (SPLIT - 1) * 512);
    }

    const bool is_producer = warp >= WARPS, loads_half = warp % 4 < 2;
    // Of x, for producer warps: 4 tokens by 64 columns at a time, eight lanes per token. Past the last token any x is right:
    // nobody stores its sums.
    const u16* row[LOADED];
    UNROLL for (int j = 0; j < LOADED; j++) {
        const int token = min(m0 + j * 16 + (int)warp % 4 * 4 + (int)lane / 8, M - 1);
        row[j] = x + (u64)token * K + own + begin * KS + lane % 8 * 8;
    }
    auto columns = [&](int slab) { return K - slab * KS - (int)lane % 8 * 8; };
    Share held[AHEAD];
    const int tile = n0 / 16 + warp, tiles = (N + 15) / 16, blocks = (K + KB - 1) / KB;
    const u32 last = tile < tiles ? blocks : 0, last_group = tile < tiles ? groups : 0;  // past them, zeros
    const int own_group = GROUP ? own / (GROUP + !GROUP) : 0;
    const uint4* const words_from = kept(codes + (tile * blocks + own / KB) * 32 + lane);  // a stage adds one index
    const Scales* const scales_from = kept(scales + (tile * groups + own_group) * 8 + g);
    const u32 ring = stages + WORDS + warp * W;
    const u32 words_to = kept(ring + lane * 16), scales_to = kept(ring + DEPTH * 512 + g * (u32)sizeof(Scales));
    const u64 policy = token_tiles == 1 && !READ_AGAIN ? evict_first() : evict_normal();  // only one block reads these weights?
    // Of rows past the end any words are right: nobody stores their sums.
    const Stage last_copied = EVEN && tile >= tiles ? 0 : end;
    auto copy_stage = [&](Stage slab, u32 j) {
        const u32 at = EVEN ? j * WARPS * W : kept(j * WARPS * W);
        const bool there = slab < last_copied;
        if (EVEN || there) {
            const uint4* const words = words_from + slab * DEPTH * 32;
            UNROLL for (u32 d = 0; d < DEPTH; d++)
                copy_once(words_to + at + d * 512, words + d * 32, policy, !EVEN || there,
                          !EVEN && slab * DEPTH + d >= last);
            UNROLL for (u32 f = 0; f < FOLDS; f++) {
                const Stage first = slab * KS + f * FOLD;
                const Stage group = EVEN && GROUP == FOLD ? slab * FOLDS + f : GROUP ? first / max(GROUP, 1) : 0;
                copy_few<sizeof(Scales)>(scales_to + at + f * FOLD_BYTES, scales_from + group * 8,
                                         t == 0 && (!EVEN || there), !EVEN && group >= last_group);
            }
        }
        end_of_copies();
    };
    if (is_producer) {
        UNROLL for (int j = 0; j < AHEAD; j++) if (begin + j < end) fetch(held[j], row, j * KS, columns(begin + j), loads_half);
    } else {
        UNROLL for (int j = 0; j < RING - 1; j++) copy_stage(begin + j, j);
    }
    __syncthreads();
    if (SPLIT > 1) cluster_arrive(), cluster_wait();  // every block has initialized its mbarriers

    float sum[NT][4];  // of the warps that multiply
    if (is_producer) {
        if (UNEVEN) fewer_registers<64>();
        const int token = warp % 4 * 4 + lane % 8 / 2, piece = lane % 2 * 4 + lane / 8;
        const u32 to = stages + token * 128 + (piece ^ token % 8) * 16;
        int i = 0, phase = 0;
        for (int first = begin; first < end; first += TURN_OF_X) {
            UNROLL for (int u = 0; u < TURN_OF_X; u++) {
                const int slab = first + u;
                if ((X_IN_TURNS ? may_end(u, TURN_OF_X) : u > 0) && slab >= end) break;
                if (X_IN_TURNS) i = u % STAGES;
                signal_wait(free + i * 8, phase - 1);  // in phase 0 every stage is free
                put(to + i * X, held[u % AHEAD], loads_half);
                show_matrix_unit();
                __syncwarp();
                if (lane == 0) signal_arrive(full + i * 8);
                const int next = slab + AHEAD;
                if (next < end) fetch(held[u % AHEAD], row, (u + AHEAD) * KS, columns(next), loads_half);
                if (++i == STAGES) i = 0, phase++;
            }
            UNROLL for (int j = 0; j < LOADED; j++) row[j] += TURN_OF_X * KS;
        }
    } else {
        if (UNEVEN) more_registers<104>();
        uint4 words[DEPTH];
        Scales scaling[FOLDS];
        auto read_stage = [&](int j) {
            const u32 at = j * WARPS * W;
            wait_for_copies<RING - 2>();
            __syncwarp();
            UNROLL for (int d = 0; d < DEPTH; d++) words[d] = load16(words_to + at + d * 512);
            UNROLL for (int f = 0; f < FOLDS; f++) load_few(scaling[f].rows, scales_to + at + f * FOLD_BYTES);
            __syncwarp();
        };
        UNROLL for (auto& of_eight : sum) UNROLL for (float& value : of_eight) value = 0;
        // SUMS_SCALED: products of one group's columns, which its scales multiply when the next group has begun.
        [[maybe_unused]] float part[PARTS][NT][4] = {}, part_scale[PARTS][2] = {};
        auto add_part = [&](int p) {
            UNROLL for (int n = 0; n < NT; n++) UNROLL for (int v = 0; v < 4; v++)
                sum[n][v] += part_scale[p][v / 2] * multiplied(part[p][n][v]);
        };
        u32 a[BUFFERS][STEP / 4];
        int i = 0, phase = 0, j = 0;
        read_stage(0);
        for (int first = begin; first < end; first += TURN) UNROLL for (int u = 0; u < TURN; u++) {
            const int slab = first + u;
            if (BY_TURNS && may_end(u, TURN)) wgmma_wait<0>();
            if (may_end(u, TURN) && slab >= end) break;
            if (TURN > 1) i = u % STAGES, j = u % RING;
            copy_stage(slab + RING - 1, j == 0 ? RING - 1 : j - 1);
            if (++j == RING) j = 0;
            UNROLL for (int column = 0; column < KS; column += STEP) {
                const int p = (u * FOLDS + column / FOLD) % PARTS;  // whose turn it is
                auto& now = a[(u * KS + column) / STEP % BUFFERS];
                UNROLL for (int r = 0; r < STEP / 4; r++) {
                    const int of = column / 4 + r;
                    const u32 word = (&words[of / PER_WORD / 4].x)[of / PER_WORD % 4];
                    const Factors f = factors(scaling[of / 4 * 16 / FOLD], r % 2);
                    now[r] = SUMS_SCALED ? unpack(word, of % PER_WORD, f.minus_zero) : unpack(word, of % PER_WORD, f);
                }
                const bool group_begins = SUMS_SCALED && column % FOLD == 0;
                if (group_begins && !BY_TURNS) wgmma_wait<0>(), add_part(0);
                if (group_begins) UNROLL for (int row = 0; row < 2; row++)
                    part_scale[p][row] = scale(scaling[column / FOLD], row);
                if (column + STEP == KS) read_stage(j);
                if (column == 0) signal_wait(full + i * 8, phase);
                if (BY_TURNS && u + column == 0) wgmma_wait<0>();
                wgmma_begin();
                UNROLL for (int k = 0; k < STEP; k += 16) {
                    const u32 from = stages + i * X, piece = (column + k) / 64 * MT * 8 + (column + k) % 64 / 8;
                    const u64 of = NARROW ? matrix_piece(from, piece) : matrix(from) + piece;
                    if constexpr (!SUMS_SCALED) multiply_tile(sum, now + k / 4, of);
                    else if (column % FOLD == 0 && k == 0) multiply_tile<true>(part[p], now, of);
                    else multiply_tile(part[p], now + k / 4, of);
                }
                wgmma_end();
                wgmma_wait<BUFFERS - 1>();  // the next buffer of `a` is free; before the last step, the previous stage
                if (BY_TURNS && group_begins) add_part(1 - p);
                // All lanes of the warp have waited (`.sync`), so one arrives for them. No `__syncwarp()` here: ptxas
                // would take it for the end of the pipeline of products and let each product wait (C7513).
                if (column == (BUFFERS - 2) * STEP && slab > begin && lane == 0)
                    signal_arrive(free + (i == 0 ? STAGES - 1 : i - 1) * 8);
            }
            if (++i == STAGES) i = 0, phase++;
        }
        wgmma_wait<0>();
        const bool last = SUMS_SCALED && (end - begin) * FOLDS % PARTS == 0;
        if (SUMS_SCALED) last ? add_part(PARTS - 1) : add_part(0);
        if (SUMS_SCALED) UNROLL for (int n = 0; n < NT; n++) UNROLL for (int v = 0; v < 4; v++) sum[n][v] *= 1 << DOWN;
        wait_for_copies<0>();
    }
    // Stages are read. Producers, which only write them, wait as well, and at the same place: compute-sanitizer reports a race
    // where they pass one barrier fewer, and divergence where they have one of their own.
    if (OVERLAID && SPLIT > 1) cluster_arrive(), cluster_wait();
    if (OVERLAID && SPLIT == 1) __syncthreads();
    if (!is_producer) land_sums(sum, landing, landed, rank, 0, warp, lane);
    __syncthreads();
    if (SPLIT > 1) wait_for_bytes(landed);
    store_sums(y, landing, rank, warp, WARPS + 4, lane, m0, n0, M, N);
    end_behind_head();
}
