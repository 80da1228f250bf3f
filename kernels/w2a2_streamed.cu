// y[m, n] = f[n] sum_g s_w[n, g] s_x[m, g] sum_{k in g} (q_w[n, k] - z_w[n, g]) (q_x[m, k] - z_x[m, g]), 2 bits each, in
// groups of 32. See w2a2_gemv.py, and w2a2_format.py for the weight. Compute capability 9.0 and later.
//
// Compiled once per shape and configuration; the launcher defines:
//   G       groups of a row                      TOKENS  1..4, rows of x
//   WARPS   warps that multiply; one more brings weights and stores y
//   TILES   tiles of 8 rows in a stage           STAGES  stages of the ring
//   REAL    1 for zeros in float16               SHARED  bytes of dynamic shared memory
//   READY   1 for quantized activations          GATHER  1 for columns by `index`
//   FLOAT   1 for x and y in float32             BF16    else 1 for bfloat16, 0 for float16
//
// Rows of the weight that follow one another are contiguous: a stage is one bulk copy each of codes, scales and zeros.
// One thread block per SM requests all its stages before it quantizes x.
//
// Operand A of the binary mma m16n8k256 is 8 rows in two bit planes: registers of row g hold plane 0, those of row
// g + 8 plane 1. Operand B has one word, a plane of a group of x, in each of its 8 columns, and zeros: column j is
// masked to group j, so that C has the bit counts of 8 groups and nothing is unpacked. Two such products are a chunk of
// 16 groups; lane 4 g + t loads words 4 t to 4 t + 3 of row g of a chunk, and gets the counts of these very groups.
//
// The zero point of x costs nothing: q - z = (x0 - z0) + 2 (x1 - z1), where x_b - 1 = -(1 - x_b). A plane whose zero bit
// is 1 is stored complemented, and its counts are subtracted. A count is read as a subnormal float, count * 2^-149.
#include "ptx.cuh"

constexpr int ROWS = 8 * TILES, THREADS = 32 * WARPS, PARTS = WARPS / TILES; // PARTS warps share a tile's columns
constexpr int CHUNKS = (G + 15) / 16, PADDED = 16 * CHUNKS;                  // groups, as x has them in shared memory
constexpr int CODE_BYTES = 8 * G, ZERO_BYTES = REAL ? 2 * G : (G + 3) / 4;   // of a row; scales: G
constexpr int SCALES_AT = ROWS * CODE_BYTES;                                 // in a stage
constexpr int ZEROS_AT = SCALES_AT + (ROWS * G + 47) / 16 * 16; // copies begin 16-byte aligned; lanes read past the end
constexpr int STAGE = ZEROS_AT + (ROWS * ZERO_BYTES + 63) / 16 * 16;
constexpr int OUTPUTS = ROWS * TOKENS, MINE = (OUTPUTS + 31) / 32; // of a stage, and of a lane
constexpr int PIECES = 3;                                          // bulk copies of a stage: codes, scales, zeros
constexpr float UNIT = 1.3292279957849159e36f;                     // 2^120
constexpr float RAISED = 536870912.0f;                             // 2^29: counts times UNIT are counts * 2^-29
static_assert(STAGES * (STAGE + PARTS * OUTPUTS * 4) + TOKENS * PADDED * 24 <= SHARED, "shared memory");

// What a group of a token is in a sum: sum = first count0 + second count1 + third z_w, times scale.
struct alignas(16) Group {
    float first, second, third, scale;
};

#if !READY
#if FLOAT
using Value = float;
#else
using Value = u16;
#endif
struct Eight { // activations of neighbouring columns
    u32 word[FLOAT ? 8 : 4];
    INLINE float operator[](int i) const {
#if FLOAT
        return __uint_as_float(word[i]);
#else
        return to_float<BF16>(word[i / 2] >> 16 * (i % 2) & 0xFFFF);
#endif
    }
};
INLINE Eight load_eight(const Value *x, const u32 *index, int column, int columns) { // of one token
    Eight v;
#if GATHER
    const uint4 places[2] = {__ldg((const uint4 *)(index + column)), __ldg((const uint4 *)(index + column + 4))};
    UNROLL for (int i = 0; i < 8; i++) {
        const u32 at = ((const u32 *)places)[i];
        Value value = 0;
        if (at < columns) value = __ldg(x + at);
#if FLOAT
        v.word[i] = __float_as_uint(value);
#else
        v.word[i / 2] = i % 2 ? v.word[i / 2] | (u32)value << 16 : value;
#endif
    }
#else
    UNROLL for (int i = 0; i < (FLOAT ? 2 : 1); i++) ((uint4 *)v.word)[i] = __ldg((const uint4 *)(x + column) + i);
#endif
    return v;
}
// floor(v + z + 1/2), at most 3, in bits 1 and 2: near 1.5 * 2^22 a float's last bit is 1/2.
INLINE u32 code(float v, float half_and_zero) {
    return min(__float_as_uint(__fadd_rd(v, half_and_zero)), 0x4AC00007u);
}
constexpr float NEAR = 6291456.0f; // 1.5 * 2^22, 0x4AC00000
#endif

// The bytes `begin` to `end` of a tensor of `whole` bytes, in shared memory at `begin % 16`: whole pieces of 16 bytes
// are copied in bulk; those that the tensor's end cuts off, by this thread.
struct Range {
    const char *tensor;
    u64 begin, end, whole;
    INLINE u64 first() const { return begin / 16 * 16; }
    INLINE u64 last() const { return min((end + 15) / 16 * 16, whole / 16 * 16); }
    INLINE u32 bytes() const { return (u32)(last() - first()); }
    INLINE void finish(char *to) const {
#pragma unroll 1
        for (u64 i = last(); i < end; i++) to[i - first()] = __ldg(tensor + i);
    }
    INLINE void fetch(char *to, u32 arrived, u64 policy) const {
        if (bytes()) copy_bulk(shared_address(to), tensor + first(), bytes(), arrived, policy);
    }
};

extern "C" __global__ void __launch_bounds__(THREADS + 32, 1)
w2a2_streamed(const void *__restrict__ x, const u32 *__restrict__ index, const u32 *__restrict__ x_codes,
          const float *__restrict__ x_scales, const int *__restrict__ x_zeros, const char *__restrict__ codes,
          const char *__restrict__ scales, const char *__restrict__ zeros, const float *__restrict__ factors,
          void *__restrict__ y, int N, int columns) { // columns of x
    extern __shared__ __align__(128) char shared[];
    __shared__ u64 full[STAGES], done[STAGES]; // mbarriers: a stage has arrived, its sums are there
    const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32, g = lane / 4, t = lane % 4;
    const int jobs = (N + ROWS - 1) / ROWS; // stages of the whole weight, dealt to thread blocks in turn

    Group *groups = (Group *)(shared + STAGES * STAGE);   // [TOKENS][PADDED]
    u32 *words = (u32 *)(groups + TOKENS * PADDED);       // [TOKENS][PADDED / 4][2][2][2]: group % 2, group / 2 % 2, plane
    float *sums = (float *)(words + TOKENS * PADDED * 2); // [STAGES][PARTS][TOKENS][ROWS]

    auto bring = [&](int stage, int job, int part) { // codes, scales or zeros, by one thread
        if (job >= jobs) return;
        const u32 arrived = shared_address(&full[stage]);
        const u32 width = part == 0 ? CODE_BYTES : part == 1 ? G : ZERO_BYTES;
        const char *tensor = part == 0 ? codes : part == 1 ? scales : zeros;
        char *to = shared + stage * STAGE + (part == 0 ? 0 : part == 1 ? SCALES_AT : ZEROS_AT);
        const u64 row = (u64)job * ROWS, end = min((u64)N, row + ROWS);
        const Range range{tensor, row * width, end * width, (u64)N * width};
        range.finish(to);
        signal_expect(arrived, range.bytes());
        range.fetch(to, arrived, evict_first());
    };
    auto keep = [&](int m, int group, u32 x0, u32 x1, float scale, int zero) { // a group of a token
        const float sum = __popc(x0) + 2 * __popc(x1) - 32 * zero;
        const float unit = REAL ? 1 / RAISED : UNIT / (1 << 2 * (group % 4)); // packed zeros are masked in place
        groups[m * PADDED + group] = {zero & 1 ? -UNIT : UNIT, zero & 2 ? -2 * UNIT : 2 * UNIT, -sum * unit, scale};
        u32 *to = words + m * PADDED * 2 + (group / 4 * 2 + group % 2) * 4 + group % 4 / 2 * 2;
        to[0] = zero & 1 ? ~x0 : x0, to[1] = zero & 2 ? ~x1 : x1;
    };

    if (warp == WARPS) {
        for (int stage = lane; stage < STAGES; stage += 32) {
            signal_init(shared_address(&full[stage]), PIECES);
            signal_init(shared_address(&done[stage]), WARPS);
        }
        show_signals();
        __syncwarp();
#pragma unroll 1
        for (int i = lane; i < PIECES * STAGES; i += 32)
            bring(i / PIECES, blockIdx.x + i / PIECES * gridDim.x, i % PIECES);
        __syncwarp();
    } else {
        for (int i = thread; i < TOKENS * (PADDED - G); i += THREADS) { // groups that do not exist add nothing
            const int m = i / max(1, PADDED - G), group = G + i % max(1, PADDED - G);
            keep(m, group, 0, 0, 0, 0);
        }
#if READY
#pragma unroll 4
        for (int i = thread; i < TOKENS * G; i += THREADS) {
            const int m = i / G, group = i % G;
            const u32 *word = x_codes + m * 2 * G + group;
            keep(m, group, __ldg(word), __ldg(word + G), __ldg(x_scales + i), __ldg(x_zeros + i));
        }
#else
        constexpr int ITEMS = TOKENS * 4 * G, NEEDED = (ITEMS + THREADS - 1) / THREADS; // of 8 columns; of a thread
        constexpr int MOST = FLOAT || GATHER ? 4 : TOKENS > 1 ? 6 : 8, BATCH = NEEDED < MOST ? NEEDED : MOST; // loaded before the first
#pragma unroll 1
        for (int from = thread; from < NEEDED * THREADS; from += BATCH * THREADS) { // is used; lanes stay together
            Eight held[BATCH] = {};
            UNROLL for (int b = 0; b < BATCH; b++) {
                const int item = from + b * THREADS, m = item / (4 * G);
                const Value *token = (const Value *)x + (u64)m * columns;
                if (item < ITEMS) held[b] = load_eight(token, index, item % (4 * G) * 8, columns);
            }
            UNROLL for (int b = 0; b < BATCH; b++) {
                const int item = from + b * THREADS, m = item / (4 * G), group = item % (4 * G) / 4;
                float low = 0, high = 0;
                UNROLL for (int i = 0; i < 8; i++) low = fminf(low, held[b][i]), high = fmaxf(high, held[b][i]);
                UNROLL for (int i = 1; i < 4; i *= 2) { // the four lanes of a group
                    low = fminf(low, __shfl_xor_sync(~0u, low, i));
                    high = fmaxf(high, __shfl_xor_sync(~0u, high, i));
                }
                float scale = __fdiv_rn(high - low, 3.0f);
                if (scale == 0) scale = 1;
                const u32 zero = code(__fdiv_rn(-low, scale), NEAR + 0.5f) >> 1 & 3;
                const float inverse = __fdiv_rn(1.0f, scale), half_and_zero = NEAR + 0.5f + zero;
                u32 x0 = 0, x1 = 0;
                UNROLL for (int i = 0; i < 8; i++) {
                    const float v = held[b][i], quotient = v * inverse; // rounded as a division after one step of Newton
                    const u32 q = code(__fmaf_rn(__fmaf_rn(-quotient, scale, v), inverse, quotient), half_and_zero);
                    x0 |= (q >> 1 & 1) << i, x1 |= (q >> 2 & 1) << i;
                }
                x0 <<= 8 * t, x1 <<= 8 * t;
                UNROLL for (int i = 1; i < 4; i *= 2) {
                    x0 |= __shfl_xor_sync(~0u, x0, i);
                    x1 |= __shfl_xor_sync(~0u, x1, i);
                }
                if (t == 0 && item < ITEMS) keep(m, group, x0, x1, scale, zero);
            }
        }
#endif
    }
    __syncthreads();

    int stage = 0, turn = 0;
    if (warp == WARPS) { // adds the parts of a stage in their order, then brings another one into its place
#pragma unroll 1
        for (int job = blockIdx.x; job < jobs; job += gridDim.x) {
            float factor[MINE], sum[MINE];
            UNROLL for (int i = 0; i < MINE; i++) // before the wait
                factor[i] = __ldg(factors + min(job * ROWS + (lane + 32 * i) % ROWS, N - 1)) * RAISED;
            signal_wait(shared_address(&done[stage]), turn);
            UNROLL for (int i = 0; i < MINE; i++) {
                sum[i] = 0;
                if (lane + 32 * i < OUTPUTS)
                    UNROLL for (int part = 0; part < PARTS; part++)
                        sum[i] += sums[(stage * PARTS + part) * OUTPUTS + lane + 32 * i];
            }
            __syncwarp();
            if (lane < PIECES) bring(stage, job + STAGES * gridDim.x, lane);
            UNROLL for (int i = 0; i < MINE; i++) {
                const int o = lane + 32 * i, row = job * ROWS + o % ROWS;
                if (o >= OUTPUTS || row >= N) continue;
                const u64 to = (u64)(o / ROWS) * N + row;
#if FLOAT
                ((float *)y)[to] = sum[i] * factor[i];
#else
                ((u16 *)y)[to] = to_half<BF16>(sum[i] * factor[i]);
#endif
            }
            if (++stage == STAGES) stage = 0, turn++;
        }
        return;
    }

    const int tile = warp / PARTS, part = warp % PARTS, row = tile * 8 + g; // of a stage
    const bool holds = g / 2 == t, odd = g % 2; // column g of B: groups 4 t + g % 2 and 4 t + 2 + g % 2, by this lane
#pragma unroll 1
    for (int job = blockIdx.x; job < jobs; job += gridDim.x) {
        const char *slot = shared + stage * STAGE;
        const u64 before = (u64)job * ROWS;
        const u32 *w = (const u32 *)(slot + row * CODE_BYTES);
        const unsigned char *s = (const unsigned char *)slot + SCALES_AT + before * G % 16 + row * G;
        const unsigned char *z = (const unsigned char *)slot + ZEROS_AT + before * ZERO_BYTES % 16 + row * ZERO_BYTES;
        float total[TOKENS] = {};
        signal_wait(shared_address(&full[stage]), turn);
        for (int chunk = part; chunk < CHUNKS; chunk += PARTS) {
            const int first = 16 * chunk + 4 * t; // of this lane's groups
            u32 plane[2][4], bytes[4], packed = 0;
            float step[4], zero[4];
            if (G % 4 == 0) {
                UNROLL for (int p = 0; p < 2; p++) *(uint4 *)plane[p] = *(const uint4 *)(w + p * G + first);
                const u32 four = *(const u32 *)(s + first);
                bytes[0] = four << 20, bytes[1] = four << 12, bytes[2] = four << 4, bytes[3] = four >> 4;
            } else {
                UNROLL for (int i = 0; i < 4; i++) {
                    plane[0][i] = w[first + i], plane[1][i] = w[G + first + i];
                    bytes[i] = (u32)s[first + i] << 20;
                }
            }
            if (!REAL) packed = z[first / 4];
            UNROLL for (int i = 0; i < 4; i++) { // E4M3 and float32 differ in where their exponents begin, by 120
                step[i] = __uint_as_float(bytes[i] & 0x0FF00000) * UNIT;
                if (REAL) zero[i] = G % 16 == 0 || first + i < G ? half_to_float(((const u16 *)z)[first + i]) : 0;
                else zero[i] = __uint_as_float(packed & 3 << 2 * i);
            }
            UNROLL for (int m = 0; m < TOKENS; m++) {
                uint4 own = {0, 0, 0, 0};
                if (holds) own = *(const uint4 *)(words + m * PADDED * 2 + (first / 4 * 2 + odd) * 4);
                const u32 word[2][2] = {{own.x, own.y}, {own.z, own.w}};
                UNROLL for (int pair = 0; pair < 2; pair++) {
                    const u32 a[4] = {plane[0][2 * pair], plane[1][2 * pair], plane[0][2 * pair + 1], plane[1][2 * pair + 1]};
                    int count[2][4] = {}; // by plane of x; of both planes of the weight in two groups
                    UNROLL for (int p = 0; p < 2; p++)
                        count_common(count[p], a, odd ? 0 : word[pair][p], odd ? word[pair][p] : 0);
                    UNROLL for (int i = 0; i < 2; i++) {
                        const Group x_group = groups[m * PADDED + first + 2 * pair + i];
                        const float count0 = __uint_as_float(count[0][i] + 2 * count[0][2 + i]);
                        const float count1 = __uint_as_float(count[1][i] + 2 * count[1][2 + i]);
                        float whole = zero[2 * pair + i] * x_group.third;
                        whole = __fmaf_rn(count0, x_group.first, __fmaf_rn(count1, x_group.second, whole));
                        total[m] = __fmaf_rn(step[2 * pair + i] * x_group.scale, whole, total[m]);
                    }
                }
            }
        }
        UNROLL for (int m = 0; m < TOKENS; m++) {
            UNROLL for (int i = 1; i < 4; i *= 2) total[m] += __shfl_xor_sync(~0u, total[m], i);
            if (t == 0) sums[((stage * PARTS + part) * TOKENS + m) * ROWS + row] = total[m];
        }
        __syncwarp();
        if (lane == 0) signal_arrive(shared_address(&done[stage]));
        if (++stage == STAGES) stage = 0, turn++;
    }
}
