// y[M, N] = x[M, K] W^T for packed low-bit W (w4a16_gemm.py describes the algorithm), and W itself (dequantize.py).
//
// Compile-time constants: BITS 2, 4 or 8; GROUP columns (0: one group per row); SYMMETRIC; BF16 (else fp16); for the
// product
//   MT      tokens of a tile, a multiple of 4          RT      16-row tiles per warp
//   WR, WK  warps along rows, along columns            KS      columns of a stage of the whole thread block
//   STAGES  stages in shared memory                    BLOCKS  thread blocks per SM (caps registers)
//   COLUMNS K, if nothing ends within a tile or a stage
//   SPLIT   thread blocks of a cluster, which split K  SCALED  1: a group's scale multiplies the weights; 0: its sums,
//                                                              with one rounding less and more registers

#include "beside.cuh"
#include "unpack.cuh"

#ifndef MT
// ------------------------------------------------------------------------------------------------ dense W [N, K]
INLINE Scales load_scales(const Scales* p) {
    Scales s;
    if (SYMMETRIC) *(u32*)&s = __ldg((const u32*)p);
    else *(uint2*)&s = __ldg((const uint2*)p);
    return s;
}
extern "C" __global__ void dequantize(const uint4* codes, const Scales* scales, u16* w, int N, int K, int groups) {
    int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, blocks = (K + KB - 1) / KB;
    int index = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, tile = index / blocks, block = index % blocks;
    if (tile >= (N + 15) / 16) return;
    uint4 words = codes[index * 32 + lane];
    UNROLL for (int pair = 0; pair < KB / 32; pair++) {  // two k-steps: eight neighbouring columns of rows g and g + 8
        int column = block * KB + pair * 32 + 8 * t;
        if (column >= K) break;
        Scales s = load_scales(scales + (tile * groups + (GROUP ? column / max(GROUP, 1) : 0)) * 8 + g);
        UNROLL for (int half = 0; half < 2; half++) {
            int row = tile * 16 + g + 8 * half;
            if (row >= N) break;
            uint4 out;
            UNROLL for (int j = 0; j < 4; j++) {  // columns 2j, 2j + 1
                int r = 4 * (2 * pair + j / 2) + 2 * (j % 2) + half;
                u32 code = (&words.x)[r / PER_WORD] >> (BITS * (r % PER_WORD));
                float z = zero(s, half), step = scale(s, half);
                constexpr unsigned mask = (1 << BITS) - 1;
                (&out.x)[j] = to_halves<BF16>(((code & mask) - z) * step, ((code >> 16 & mask) - z) * step);
            }
            u16* to = w + (long long)row * K + column;
            if (K % 8 == 0) *(uint4*)to = out;
            else UNROLL for (int e = 0; e < 8; e++) if (column + e < K) to[e] = (&out.x)[e / 2] >> 16 * (e % 2);
        }
    }
}
#else
// ------------------------------------------------------------------------------------------------ the product
constexpr int KW = KS / WK;                             // columns of a stage that one warp works on
constexpr int DEPTH = KW / KB;                          // packed blocks of a row tile in them
constexpr int FOLD = GROUP && GROUP < KW ? GROUP : KW;  // columns that share a scale
constexpr int NT = (MT + 7) / 8, ROWS = 16 * RT * WR, MEMBERS = 32 * WR;
// A stage of the WR warps that share columns: x, then the words of their row tiles, then their scales.
constexpr int WORDS = MT * KW * 2, SCALES = WORDS + WR * RT * DEPTH * 512,
              SCALE_BYTES = sizeof(Scales) * 8 * (KW / FOLD);
constexpr int STAGE = (SCALES + WR * RT * SCALE_BYTES + 127) / 128 * 128;
// A unit is the sums of 16 rows and 8 tokens. Its WK parts in a thread block overwrite the stages and are added up
// there. One of the SPLIT blocks gets what the others have of it, behind its stages, which it may still be reading.
constexpr int UNITS = WR * RT * NT;
#if SPLIT > 1
constexpr int SLOTS = (UNITS + SPLIT - 1) / SPLIT;  // units that a block gets, at most
constexpr int LANDING = WK * (STAGES * STAGE > UNITS * 512 ? STAGES * STAGE : UNITS * 512);
#endif

// Where each stage of a thread block has a place of its own, all are copied at once and the loop over them is unrolled.
#if COLUMNS && COLUMNS % (KS * SPLIT) == 0 && COLUMNS <= KS * SPLIT * STAGES
constexpr int ALL = COLUMNS / (KS * SPLIT), AHEAD = ALL;
#else
constexpr int ALL = 0, AHEAD = STAGES - 1;  // stages that are copied before the first is used
#endif

static_assert(MT % 4 == 0 && MEMBERS % (KW / 8) == 0 && KW % KB == 0 && KW % 64 == 0 && KW % FOLD == 0 &&
                  (GROUP == 0 || GROUP % FOLD == 0) && STAGES >= 2,
              "a stage does not divide, or there are too few");
static_assert(WK < 16, "each warp along columns has a named barrier, of 16, and __syncthreads has one");

extern "C" __global__ void
#if SPLIT > 1
__cluster_dims__(SPLIT)
#endif
    __launch_bounds__(MEMBERS* WK, BLOCKS)
        gemm(const u16* x, const uint4* codes, const Scales* scales, u16* y, int M, int N, int columns, int all_groups) {
    extern __shared__ __align__(1024) char shared[];
#if COLUMNS  // copies are known numbers of bytes apart, and none of words or columns lies behind the end
    constexpr bool EVEN = true;
    constexpr int K = COLUMNS, groups = GROUP ? K / (GROUP + !GROUP) : 1;
    static_assert(K % KS == 0, "a stage does not divide the columns");
#else
    constexpr bool EVEN = false;
    const int K = columns, groups = all_groups;
#endif
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const int rank = blockIdx.x % SPLIT, token_tiles = (M + MT - 1) / MT, cluster = blockIdx.x / SPLIT;
    const int m0 = cluster % token_tiles * MT, n0 = cluster / token_tiles * ROWS;  // neighbouring blocks share weights
    const int my_tile = warp % WR * RT, first_tile = n0 / 16 + my_tile, my_column = warp / WR * KW;
    const int tiles = (N + 15) / 16, slabs = (K + KS - 1) / KS;
    const u32 blocks = (K + KB - 1) / KB;
    const int begin = slabs * rank / SPLIT, end = slabs * (rank + 1) / SPLIT;  // this block's stages: at least one
    const u32 sums = shared_address(shared);
    let_tail_begin();
#if SPLIT > 1
    const u32 landing = sums + LANDING, landed = landing + SPLIT * SLOTS * 512;
    if (threadIdx.x == 0) expect_bytes(landed, (UNITS - rank + SPLIT - 1) / SPLIT * (SPLIT - 1) * 512);
    cluster_arrive();
#endif

    // The WR warps that share columns are a pipeline with its own stages and named barrier, so that two pipelines drift
    // apart and one unpacks while the other multiplies. Past the end of x or W the copies write zeros.
    const u32 stages = shared_address(shared) + warp / WR * STAGES * STAGE;
    const u64 policy = token_tiles == 1 && !READ_AGAIN ? evict_first() : evict_normal();  // only one block reads these weights?
    // Where a lane copies from and to, but for the stage: kept in registers, so that a stage adds one index to each. The
    // integer instructions of addresses cost as much as those that unpack.
    constexpr int CHUNKS = KW / 8, TOKENS = MEMBERS / CHUNKS;
    const u32 token = threadIdx.x % MEMBERS / CHUNKS, chunk = threadIdx.x % CHUNKS;
    const u32 tokens_left = M - m0, tiles_left = tiles > first_tile ? tiles - first_tile : 0;
    const uint4* const words_from = kept(codes + (u32)(first_tile * blocks) * 32 + lane);
    const Scales* const scales_from = kept(scales + (u32)(first_tile * groups) * 8 + g);
    const u16* const x_from = kept(x + (u64)(m0 + token) * K + my_column + chunk * 8);
    const u32 words_to = kept(WORDS + my_tile * DEPTH * 512 + lane * 16);
    const u32 scales_to = kept(SCALES + my_tile * SCALE_BYTES + g * (u32)sizeof(Scales));
    const u32 x_to = kept(token * KW * 2 + (chunk ^ (token & 1) * 4) * 16);
    auto stage = [&](u32 to, u32 buffer) {
        // `stages` differs between warps: of an address in a register that all warps share, ptxas 13.0 makes a copy with a
        // cache policy that no device runs.
        const u32 at = kept(stages + buffer * STAGE), first = to * KS + my_column, block = first / KB;
        if (to < end) {
            UNROLL for (u32 r = 0; r < RT; r++) {
                const uint4* const words = words_from + (r * blocks + block) * 32;
                UNROLL for (u32 d = 0; d < DEPTH; d++) copy_once(at + words_to + (r * DEPTH + d) * 512, words + d * 32,
                                                                 policy, true, !EVEN && (r >= tiles_left || block + d >= blocks));
                UNROLL for (u32 f = 0; f < KW / FOLD; f++) {
                    const u32 group = GROUP ? (first + f * FOLD) / max(GROUP, 1) : 0;
                    copy_few<sizeof(Scales)>(at + scales_to + r * SCALE_BYTES + f * 8 * (u32)sizeof(Scales),
                                             scales_from + (r * groups + group) * 8, t == 0,
                                             !EVEN && (r >= tiles_left || group >= groups));
                }
            }
            // Rows of KW columns; odd ones swap the 64-byte halves of every 128, so that eight lanes that read 16 bytes
            // each use all 32 banks.
            UNROLL for (u32 i = 0; i < MT; i += TOKENS) if (MT % TOKENS == 0 || token + i < MT)
                copy_past_l1(at + (x_to ^ i % 2 * 64) + i * KW * 2, x_from + (i * K + to * KS),
                             token + i >= tokens_left || (!EVEN && first + chunk * 8 >= K));
        }
        end_of_copies();
    };
    UNROLL for (int i = 0; i < AHEAD; i++) stage(begin + i, i);

    // Where the last unit has fewer than 8 tokens, lanes without one of their own read the last; nobody stores their sums.
    const u32 last_row = min(NT * 8 - 8 + g, (u32)MT - 1);
    const int tokens_end = MT % 8 ? min(M, m0 + MT) : M;
    float sum[RT][NT][4] = {};
    [[maybe_unused]] float part[RT][NT][4];  // sums of one group
    auto multiply = [&](u32 from) {  // a stage
        uint4 words[RT];
        Scales scaling[RT];
        u32 a[RT][8];
        UNROLL for (int column = 0; column < KW; column += 32) {  // two k-steps
            UNROLL for (int r = 0; r < RT; r++) {
                if (column % KB == 0)
                    words[r] = load16(from + WORDS + ((my_tile + r) * DEPTH + column / KB) * 512 + lane * 16);
                if (column % FOLD == 0)
                    load_few(scaling[r].rows,
                             from + SCALES + (my_tile + r) * SCALE_BYTES + (column / FOLD * 8 + g) * sizeof(Scales));
                UNROLL for (int v = 0; v < 8; v++) {
                    const int at = 4 * (column % KB / 16) + v;
                    const u32 word = (&words[r].x)[at / PER_WORD];
                    const Factors f = factors(scaling[r], v % 2);
                    a[r][v] = SCALED ? unpack(word, at % PER_WORD, f) : unpack(word, at % PER_WORD, f.minus_zero);
                }
            }
            if (!SCALED && column % FOLD == 0)
                UNROLL for (int v = 0; v < RT * NT * 4; v++) part[v / (NT * 4)][v / 4 % NT][v % 4] = 0;
            UNROLL for (int n = 0; n < NT; n++) {
                const bool whole = n * 8 + 8 <= MT;
                const u32 row = whole ? n * 8 + g : last_row, odd = (whole ? g : last_row) & 1;
                // The second 32 columns are in the other 64-byte half: xor, because odd tokens have the halves swapped
                const uint4 b =
                    load16(from + row * KW * 2 + column / 64 * 128 + (t * 16 ^ odd * 64 ^ column % 64 * 2));
                UNROLL for (int r = 0; r < RT; r++) mma<BF16>((SCALED ? sum : part)[r][n], a[r], b.x, b.y);
                UNROLL for (int r = 0; r < RT; r++) mma<BF16>((SCALED ? sum : part)[r][n], a[r] + 4, b.z, b.w);
            }
            if (!SCALED && (column + 32) % FOLD == 0)
                UNROLL for (int r = 0; r < RT; r++) UNROLL for (int n = 0; n < NT; n++)
                    UNROLL for (int v = 0; v < 4; v++) sum[r][n][v] += scale(scaling[r], v / 2) * part[r][n][v];
        }
    };
    UNROLL for (int i = 0; i < ALL; i++) {
        wait_for_copies<AHEAD - 1>();
        barrier(warp / WR + 1, MEMBERS);
        end_of_copies();  // of none, so that as many may be on their way in every turn
        multiply(stages + i * STAGE);
    }
    if (!ALL) {
        int slab = begin, i = 0;
        do {
            wait_for_copies<AHEAD - 1>();
            barrier(warp / WR + 1, MEMBERS);
            stage(slab + STAGES - 1, i == 0 ? STAGES - 1 : i - 1);
            multiply(stages + i * STAGE);
            i = i + 1 == STAGES ? 0 : i + 1;
        } while (++slab < end);
    }

    wait_for_copies<0>();
    __syncthreads();
    UNROLL for (int r = 0; r < RT; r++) UNROLL for (int n = 0; n < NT; n++) {
        const u32 unit = (my_tile + r) * NT + n;
        const float4 v = {sum[r][n][0], sum[r][n][1], sum[r][n][2], sum[r][n][3]};
        store16(sums + (warp / WR * UNITS + unit) * 512 + lane * 16, v);
    }
    __syncthreads();
    auto add_up = [&](float (&total)[4], u32 unit) {  // this block's parts
        uint4 parts[WK];
        UNROLL for (int k = 0; k < WK; k++) parts[k] = load16(sums + (k * UNITS + unit) * 512 + lane * 16);
        UNROLL for (int v = 0; v < WK * 4; v++) total[v % 4] += __uint_as_float((&parts[v / 4].x)[v % 4]);
    };
#if SPLIT > 1
    cluster_wait();  // every block of the cluster has started
    for (u32 i = warp; i < SLOTS * (SPLIT - 1); i += WR * WK) {  // of the units that other blocks get
        const u32 slot = i / (SPLIT - 1), other = i % (SPLIT - 1), to = other + (other >= rank);
        const u32 unit = slot * SPLIT + to;
        if (unit >= UNITS) continue;
        float total[4] = {};
        add_up(total, unit);
        const float4 v = {total[0], total[1], total[2], total[3]};
        send(landing + (rank * SLOTS + slot) * 512 + lane * 16, v, landed, to);
    }
#endif
    for (u32 slot = warp; slot * SPLIT + rank < UNITS; slot += WR * WK) {
        const u32 unit = slot * SPLIT + rank;
        float total[4] = {};
        add_up(total, unit);
#if SPLIT > 1
        wait_for_bytes(landed);
        const float own[4] = {total[0], total[1], total[2], total[3]};
        UNROLL for (int v = 0; v < 4; v++) total[v] = 0;
        UNROLL for (int block = 0; block < SPLIT; block++) {  // in the order of their columns
            const uint4 part = load16(landing + (block * SLOTS + slot) * 512 + lane * 16);
            UNROLL for (int v = 0; v < 4; v++) total[v] += block == rank ? own[v] : __uint_as_float((&part.x)[v]);
        }
#endif
        const float factor = SCALED ? 1 : 1 << DOWN;
        const int token = m0 + unit % NT * 8 + g, row = n0 + unit / NT * 16 + 2 * t;
        UNROLL for (int half = 0; half < 2; half++) {  // rows row, row + 1 of one token, then row + 8, row + 9
            const u32 pair = transpose(to_halves<BF16>(total[2 * half] * factor, total[2 * half + 1] * factor));
            u16* to = y + (u64)token * N + row + 8 * half;
            const int left = token < tokens_end ? N - row - 8 * half : 0;
            if (left > 1 && N % 2 == 0) *(u32*)to = pair;
            else if (left > 0) {
                to[0] = pair;
                if (left > 1) to[1] = pair >> 16;
            }
        }
    }
    end_behind_head();
}
#endif
