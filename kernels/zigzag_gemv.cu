// y = W x of one token for a weight in Q4_K in zigzag, all of its columns or some. Method: zigzag_gemv.py.
//
// Compile-time constants (-D). Problem: MODE 0 all columns, 1 the listed ones, 2 those above the threshold; ORDERED 0 1;
// BF16 0 1 (else float16). Launch: N2 warps of a program; STAGES batches of 16 columns that a warp has in flight; BLOCKS
// programs of an SM, which caps the registers; CLUSTER 1, or n1 thread blocks that send each other their sums (compute
// capability 9.0 and later); PROGRAMS 1, or n1 that post them in memory, all on the device at once. An argument: n1
// programs of a band of 256 rows.
//
// Row g of operand A has the low nibbles of piece g of the lines, 16 bytes of sub-blocks g / 2 * 2 (low nibbles) and the
// next (high ones), and row g + 8 the high nibbles; column n of operand B has x d scale of sub-block n. A byte of the
// piece is one product, of which the sums of row g with the columns of its two sub-blocks are used.

#include "q4_k.cuh"

constexpr int LISTED = 1, MASKED = 2; // modes
constexpr u32 BAND = 256, NONE = ~0u; // NONE: no column
constexpr u32 X_AT = BATCH, SLOT = X_AT + LINES * 4, STEP = N2 * LINES;
constexpr u32 OPERAND = 8 * LINES * 2, OWN = OPERAND + STAGES * SLOT; // bytes of a warp: operand B and its ring

extern "C" __global__ void __launch_bounds__(32 * N2, BLOCKS)
#if CLUSTER > 1
__cluster_dims__(CLUSTER, 1, 1)
#endif
zigzag(const char *__restrict__ codes, const char *__restrict__ headers, const u16 *__restrict__ x,
       const int *__restrict__ active, u16 *__restrict__ y, float *parts, int *tickets, u32 N, u32 K, u32 n1,
       u32 threshold) {
    extern __shared__ __align__(128) char shared[]; // sums of all warps, then their rings
    __shared__ int last;
    auto sums = (float (*)[BAND])shared;
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const u32 band = blockIdx.x / n1, part = blockIdx.x % n1;
    const char *band_headers = headers + (u64)band * K * HEADER;
    const char *band_codes = codes + ((u64)band * K + (MODE ? 0 : lane / 8)) * LINE + lane % 8 * 16;
    const u32 to_line = kept(lane / 8 * LINE + (lane % 8 ^ 2 * (lane / 8)) * 16);
    char *operand = shared + N2 * BAND * 4 + warp * OWN;
    const u32 ring = shared_address(operand) + OPERAND;
    const u64 policy = evict_first();
    const u32 exponent = kept(EXPONENT), from_line = kept(t * LINE + (g ^ 2 * t) * 16), at_entries = kept(lane * 8);
    const u32 count = MODE == LISTED ? __ldg(active) : K;
    const u32 first = count * part / n1 + warp * LINES, end = count * (part + 1) / n1;
#if CLUSTER > 1
    __shared__ Joined<BAND> joined;
    joined.begin(part);
#endif

    // The column that is the lane's (lanes 16 to 31 as lanes 0 to 15) of the batch at a position, or NONE.
    auto look = [&](u32 position) {
        u32 at = position + lane % LINES;
        if (at >= end) return NONE;
        if (MODE == LISTED) return (u32)__ldg(active + 1 + at);
        if (MODE == MASKED && fabsf(to_float<BF16>(__ldg(x + at))) <= __uint_as_float(threshold)) return NONE;
        return at;
    };
    // Copies the batch at a position into a slot: codes, headers and pairs of inputs, of which one is the column's. What
    // has no column is zeros.
    auto load = [&](u32 slot, u32 position, u32 column) {
        const bool none = column == NONE, mine = lane < LINES && position < end;
        const u32 own = none ? 0 : column;
        copy_few<4>(slot + X_AT + lane * 4, x + (own & ~1u), mine, none);
        copy_once(slot + HEADERS_AT + lane * HEADER, band_headers + (u64)own * HEADER, policy, mine, none);
        const char *from = band_codes + (u64)position * LINE;
        const int left = end - position - lane / 8;
        UNROLL for (u32 i = 0; i < LINES; i += 4) { // eight lanes a line
            if (MODE) from = band_codes + (u64)__shfl_sync(~0u, own, i + lane / 8, 32) * LINE - i * LINE;
            const bool skipped = MODE == MASKED ? __shfl_sync(~0u, column, i + lane / 8, 32) == NONE : left <= int(i);
            copy_once(slot + to_line + i * LINE, from + i * LINE, policy, position < end, skipped);
        }
        end_of_copies();
    };

    // A lane makes operand B of a column for sub-blocks 0 to 3 or 4 to 7.
    const u32 mine = lane % LINES, half = lane / LINES;
    const Bits bits(half);
    u16 *entries = (u16 *)operand + kept(4 * half * LINES + mine % 4 * 4 + mine / 4); // as lanes 4 g + t read them
    float c[LINES][4] = {}, minima[4] = {};                                     // of byte m of the lane's piece; of those
    // Operand B is x d scale times the power of two whose biased exponent is `power`; the first batch that is not zero
    // chooses it, and a batch with a value too large for float16 (its bits are `limit` or more) makes it smaller.
    u32 power = 253, limit = 1;
    auto compute = [&](u32 slot, u32 column) {
        wait_for_copies<STAGES - 1>();
        __syncwarp();
        u32 pair[1];
        load_few(pair, slot + X_AT + mine * 4);
        const uint4 header = load16(slot + HEADERS_AT + mine * HEADER);
        const float value = column == NONE ? 0 : to_float<BF16>(pair[0] >> 16 * (column & 1) & 0xFFFF);
        const float step = value * half_to_float(header.x), less = value * half_to_float(header.x >> 16);
        const u32 scales = bits.scales(header), own_minima = bits.minima(header);
        float v[4];
        UNROLL for (int i = 0; i < 4; i++) {
            v[i] = step * byte_to_float(scales, i, exponent);
            minima[i] += less * byte_to_float(own_minima, i, exponent);
        }
        const float largest = fmaxf(fmaxf(fabsf(v[0]), fabsf(v[1])), fmaxf(fabsf(v[2]), fabsf(v[3])));
        const u32 most = __reduce_max_sync(~0u, __float_as_uint(largest));
        if (most >= limit) {
            const u32 exponent = max(most >> 23, 8u), before = power;
            power = 261 - exponent, limit = exponent + 8 << 23; // the largest becomes 2^7 ... 2^8; 2^15 is too large
            const float change = __uint_as_float(power << 23) * __uint_as_float(254 - before << 23);
            UNROLL for (int m = 0; m < LINES; m++)
                UNROLL for (int i = 0; i < 4; i++) c[m][i] *= change;
        }
        const float factor = __uint_as_float(power << 23);
        UNROLL for (int i = 0; i < 4; i++) entries[i * LINES] = to_halves<0>(v[i] * factor, 0);
        uint4 words[4];
        UNROLL for (u32 j = 0; j < 4; j++) words[j] = load16(slot + from_line + 4 * j * LINE);
        __syncwarp();
        const uint2 b = load8(shared_address(operand) + at_entries); // sub-block g of columns t, t + 4, t + 8, t + 12
        UNROLL for (int i = 0; i < 4; i++)
            UNROLL for (int two = 0; two < 2; two++) { // two bytes of each column's word
                const u32 selector = two ? 0x7632 : 0x5410;
                const u32 p = __byte_perm(word_of(words[0], i), word_of(words[1], i), selector);
                const u32 q = __byte_perm(word_of(words[2], i), word_of(words[3], i), selector);
                const u32 p0 = lower_bytes(p), q0 = lower_bytes(q), p1 = upper_bytes(p), q1 = upper_bytes(q);
                const u32 even[4] = {p0, high_nibbles(p), q0, high_nibbles(q)};
                const u32 odd[4] = {p1, high_nibbles(p1), q1, high_nibbles(q1)};
                mma<0>(c[4 * i + 2 * two], even, b.x, b.y);
                mma<0>(c[4 * i + 2 * two + 1], odd, b.x, b.y);
            }
    };

    u32 columns[STAGES + 1]; // of the batches in flight, and of the next one
    UNROLL for (int i = 0; i <= STAGES; i++) columns[i] = look(first + i * STEP);
    UNROLL for (int i = 0; i < STAGES; i++) load(ring + i * SLOT, first + i * STEP, columns[i]);
    for (u32 position = first, at = 0; position < end; position += STEP) {
        compute(ring + at, columns[0]);
        __syncwarp();
        UNROLL for (int i = 0; i < STAGES; i++) columns[i] = columns[i + 1];
        load(ring + at, position + STAGES * STEP, columns[STAGES - 1]);
        columns[STAGES] = look(position + (STAGES + 1) * STEP);
        at = at == (STAGES - 1) * SLOT ? 0 : at + SLOT;
    }

    // Sums of the warp, by row: bytes of piece g are rows 64 (g / 2) + 16 (g % 2) and on, and those 32 after them.
    float ends[4]; // of this lane's sub-blocks 2 t and 2 t + 1: two of them
    UNROLL for (int i = 0; i < 4; i++) {
        UNROLL for (int mask = 1; mask < LINES; mask *= 2) minima[i] += __shfl_xor_sync(~0u, minima[i], mask);
        ends[i] = __shfl_sync(~0u, minima[i], t / 2 * 16, 32);
    }
    const float low = t % 2 ? ends[2] : ends[0], high = t % 2 ? ends[3] : ends[1];
    const float inverse = __uint_as_float(254 - power << 23);
    if (t == g / 2)
        UNROLL for (int m = 0; m < LINES; m += 4) { // four neighbours at once
            const u32 to = shared_address(&sums[warp][64 * t + 16 * (g % 2) + m]);
            float v[2][4];
            UNROLL for (int i = 0; i < 4; i++) {
                v[0][i] = (c[m + i][0] - c[m + i][2]) * UNITS * inverse - low;
                v[1][i] = c[m + i][3] * (UNITS / 16) * inverse - high;
            }
            UNROLL for (u32 i = 0; i < 2; i++) store16(to + 32 * 4 * i, float4{v[i][0], v[i][1], v[i][2], v[i][3]});
        }
    __syncthreads();
    auto sum_of = [&](u32 row) {
        float sum = 0;
        UNROLL for (int w = 0; w < N2; w++) sum += sums[w][row];
        return sum;
    };
    auto write = [&](u32 row, float sum) {
        if (band * BAND + row < N) y[band * BAND + row] = to_half<BF16>(sum);
    };

#if CLUSTER > 1
    joined.end(part, 32 * N2, sum_of, write);
    return;
#endif
#if PROGRAMS > 1
    post<PROGRAMS, BAND>((u32 *)parts + band * POSTS<PROGRAMS, BAND>, part, 32 * N2, (float *)shared, sum_of, write);
    return;
#endif

    // Sums of the program, then of the band by its last program.
    float *own_part = parts + (u64)(ORDERED ? blockIdx.x : band) * BAND;
    for (u32 row = threadIdx.x; row < BAND; row += 32 * N2) {
        const float sum = sum_of(row);
        if (n1 == 1) write(row, sum);
        else if (ORDERED) own_part[row] = sum;
        else atomicAdd(own_part + row, sum);
    }
    if (n1 == 1) return;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) last = atomicAdd(tickets + band, 1) == int(n1) - 1;
    __syncthreads();
    if (!last) return;
    __threadfence();
    for (u32 row = threadIdx.x; row < BAND; row += 32 * N2) {
        float sum = 0;
        if (ORDERED) {
            for (u32 i = 0; i < n1; i++) sum += __ldcg(parts + ((u64)band * n1 + i) * BAND + row);
        } else {
            sum = __ldcg(own_part + row);
            own_part[row] = 0; // for the next launch
        }
        write(row, sum);
    }
    if (threadIdx.x == 0) tickets[band] = 0;
}
