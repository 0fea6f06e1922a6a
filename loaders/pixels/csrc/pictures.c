/* Pictures go from memory into a batch: cropped, resized, mirrored and cut in one pass over them.
 *
 *     picture (any size)             one row of scratch             batch [n, H, W, C]
 *     +----------------+                                              +--------+
 *     |    +-- box --+ |  two rows   +-------------+   two pixels     |        |
 *     |    |~~~~~~~~~| | ----------> |~~~~~~~~~~~~~| ---------------> |~~~~~~~~|
 *     |    +---------+ |  blended    +-------------+   blended        | [hole] |
 *     +----------------+                                              +--------+
 *
 * `loaders/pixels/kernels.py` describes the arithmetic, and does all of it in numpy too: all paths
 * give the same bits (there is no floating point here). Nothing outside a box is read and nothing
 * outside the batch is written; Python has checked the boxes. There is no state, so any number of
 * threads may call at the same time. The AVX2 functions are for the common case, RGB.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#define HAVE_AVX2
#define AVX2 __attribute__((target("avx2")))
#endif
#ifndef __GNUC__
#define __builtin_prefetch(at) ((void)(at))
#endif

#define PAD 32  /* bytes that a vector load may reach beyond the end of a row of scratch */
#define AHEAD 4 /* rows that are asked for before their turn: a third of the time was waiting */

typedef uint8_t byte;

/* The same fields as `_KernelBatch` in kernels.py. */
struct batch {
    int64_t count, height, width, channels; /* of `out` */
    const byte *const *pictures;
    const int32_t *heights, *widths;
    const byte *flips;
    const int32_t *holes; /* or NULL */
    byte *out;
    int32_t portable; /* 1: do without AVX2 */
};

/* One axis: output i is a blend of boxed pixels first[i] and first[i] + 1. */
struct axis {
    int64_t box;   /* source pixels that are averaged before two of them are blended */
    int64_t count; /* boxed pixels */
    int32_t *first;
    byte *weight; /* of the second, out of 127 */
};

/* What eight neighbouring outputs of an RGB row need: a vector load for every two of them (they are
 * at most two pixels apart, so 12 bytes hold both), and for each output 8 bytes that say which
 * bytes of its load to take, channel by channel, first and second pixel, and their weights. */
struct eight {
    byte pick[64], weights[64];
    int32_t start[4];
};

struct scratch {
    struct axis tall, wide;
    struct eight *eights;
    byte *boxed[2]; /* boxed source rows: row r is in boxed[r & 1] */
    byte *row, *narrow;
};

static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* (x * 258 + 2^14) >> 15, written so that 16 bits suffice and compilers find their vectors. */
static inline byte blend(byte a, byte b, byte w) {
    const uint16_t x = (uint16_t)(a * (127 - w) + b * w);
    return (byte)((((uint32_t)x * 1032 >> 16) + 1) >> 1);
}

/* Asks the memory for a row that will be read soon. */
static inline void ask(const byte *row, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(row + i);
}

/* Places are in 32.32 fixed point. A mirrored axis is the same table backwards. */
static void fill_axis(struct axis *axis, int64_t extent, int64_t size, int mirrored) {
    axis->box = extent < size ? 1 : extent / size;
    axis->count = extent / axis->box;
    const int64_t step = (extent << 32) / (size * axis->box);
    const int64_t last = (axis->count - 1) << 32;
    int64_t place = step / 2 - (1LL << 31);
    for (int64_t i = 0; i < size; i++, place += step) {
        const int64_t at = place < 0 ? 0 : least(place, last);
        const int64_t to = mirrored ? size - 1 - i : i;
        axis->first[to] = (int32_t)(at >> 32);
        axis->weight[to] = (byte)(((at & 0xffffffff) * 127 + (1LL << 31)) >> 32);
    }
}

static void fill_eights(struct eight *eights, const struct axis *axis, int64_t size) {
    for (int64_t i = 0; i < size; i++) {
        const int32_t here = axis->first[i], twin = axis->first[least(i ^ 1, size - 1)];
        const int32_t start = here < twin ? here : twin;
        const uint64_t w = axis->weight[i], further = (uint64_t)(3 * (here - start));
        const uint64_t pick = 0x8080050204010300ULL + 0x010101010101ULL * further;
        const uint64_t weights = (w << 8 | (127 - w)) * 0x000100010001ULL;
        struct eight *e = &eights[i / 8];
        memcpy(e->pick + i % 8 * 8, &pick, 8);
        memcpy(e->weights + i % 8 * 8, &weights, 8);
        e->start[i % 8 / 2] = 3 * start;
    }
}

static void blend_rows(const byte *a, const byte *b, byte w, byte *out, int64_t size) {
    for (int64_t i = 0; i < size; i++) out[i] = blend(a[i], b[i], w);
}

static inline void blend_pixels(const byte *row, const struct axis *axis, int64_t size,
                                int64_t channels, byte *out) {
    for (int64_t i = 0; i < size; i++) {
        const byte *a = row + axis->first[i] * channels;
        for (int64_t c = 0; c < channels; c++)
            *out++ = blend(a[c], a[c + channels], axis->weight[i]);
    }
}

/* The rounded mean of `box` bytes, without a division where that is exact. */
static inline byte mean(uint32_t sum, uint32_t box, uint32_t inverse) {
    const uint32_t raised = sum + box / 2; /* less than 256 * box */
    return (byte)(inverse ? (uint64_t)raised * inverse >> 32 : raised / box);
}

static inline uint32_t inverse_of(int64_t box) {
    return box < 4096 ? (uint32_t)((1LL << 32) / box + 1) : 0;
}

/* The mean of `box` rows; 256 columns at a time, so that the sums stay near. */
static void mean_rows(const byte *rows, int64_t stride, int64_t box, int64_t size, byte *out) {
    if (box == 2) { /* by far the most frequent, and one instruction */
        for (int64_t i = 0; i < size; i++) out[i] = (byte)((rows[i] + rows[stride + i] + 1) >> 1);
        return;
    }
    const uint32_t inverse = inverse_of(box);
    for (int64_t from = 0; from < size; from += 256) {
        uint32_t sums[256] = {0};
        const int64_t columns = least(256, size - from);
        for (int64_t k = 0; k < box; k++)
            for (int64_t i = 0; i < columns; i++) sums[i] += rows[k * stride + from + i];
        for (int64_t i = 0; i < columns; i++) out[from + i] = mean(sums[i], (uint32_t)box, inverse);
    }
}

/* The mean of `box` neighbouring pixels. */
static inline void mean_pixels(const byte *row, int64_t box, int64_t count, int64_t channels,
                               byte *out) {
    const uint32_t inverse = inverse_of(box);
    for (int64_t i = 0; i < count; i++, row += box * channels)
        for (int64_t c = 0; c < channels; c++) {
            uint32_t sum = 0;
            for (int64_t k = 0; k < box; k++) sum += row[k * channels + c];
            *out++ = mean(sum, (uint32_t)box, inverse);
        }
}

static inline void mirror(const byte *row, int64_t pixels, int64_t channels, byte *out) {
    for (row += (pixels - 1) * channels; pixels > 0; pixels--, row -= channels)
        for (int64_t c = 0; c < channels; c++) *out++ = row[c];
}

#ifdef HAVE_AVX2

static inline __m128i load(const byte *at) { return _mm_loadu_si128((const __m128i *)at); }

AVX2 static inline __m256i load2(const byte *low, const byte *high) {
    return _mm256_inserti128_si256(_mm256_castsi128_si256(load(low)), load(high), 1);
}

AVX2 static inline __m256i load32(const byte *at) {
    return _mm256_loadu_si256((const __m256i *)at);
}

/* Pairs of bytes (first, second) times their pairs of weights, rounded as `blend` does. */
AVX2 static inline __m256i blend_pairs(__m256i pairs, __m256i weights) {
    return _mm256_mulhrs_epi16(_mm256_maddubs_epi16(pairs, weights), _mm256_set1_epi16(258));
}

AVX2 static inline void blend_32(const byte *a, const byte *b, __m256i weights, byte *out) {
    const __m256i first = load32(a), second = load32(b);
    const __m256i low = blend_pairs(_mm256_unpacklo_epi8(first, second), weights);
    const __m256i high = blend_pairs(_mm256_unpackhi_epi8(first, second), weights);
    _mm256_storeu_si256((__m256i *)out, _mm256_packus_epi16(low, high));
}

AVX2 static void blend_rows_avx2(const byte *a, const byte *b, byte w, byte *out, int64_t size) {
    const __m256i weights = _mm256_set1_epi16((int16_t)(w << 8 | (127 - w)));
    int64_t i = 0;
    for (; i + 32 <= size; i += 32) blend_32(a + i, b + i, weights, out + i);
    if (i == size) return;
    /* The rest: 32 bytes that end where the row does, as nothing behind it may be read. */
    if (size >= 32) blend_32(a + size - 32, b + size - 32, weights, out + size - 32);
    else blend_rows(a, b, w, out, size);
}

/* Four pixels of 16-bit channels, each with one to spare. */
AVX2 static inline __m256i blend_four(const byte *row, const int32_t *start, const byte *pick,
                                      const byte *weights) {
    const __m256i pixels = load2(row + start[0], row + start[1]);
    return blend_pairs(_mm256_shuffle_epi8(pixels, load32(pick)), load32(weights));
}

AVX2 static void blend_rgb_avx2(const byte *row, const struct eight *e, int64_t size, byte *out) {
    const __m256i compact = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(0, 1, 2, 4, 5, 6, 8, 9, 10, 12, 13, 14, -1, -1, -1, -1));
    byte end[PAD];
    for (int64_t left = 3 * size; left > 0; e++, out += 24, left -= 24) {
        const __m256i low = blend_four(row, e->start, e->pick, e->weights);
        const __m256i high = blend_four(row, e->start + 2, e->pick + 32, e->weights + 32);
        /* Bytes now. Two pixels a quarter, in the order 0 2 1 3. */
        const __m256i mixed = _mm256_packus_epi16(low, high);
        const __m256i spaced = _mm256_permute4x64_epi64(mixed, _MM_SHUFFLE(3, 1, 2, 0));
        const __m256i pixels = _mm256_shuffle_epi8(spaced, compact);
        /* 28 bytes are written for 24: at the end of the row they must go elsewhere first. */
        byte *to = left >= 28 ? out : end;
        _mm_storeu_si128((__m128i *)to, _mm256_castsi256_si128(pixels));
        _mm_storeu_si128((__m128i *)(to + 12), _mm256_extracti128_si256(pixels, 1));
        if (to == end) memcpy(out, end, (size_t)least(left, 24));
    }
}

/* `mean_pixels` for RGB and a box of 2. */
AVX2 static void halve_rgb_avx2(const byte *row, int64_t count, byte *out) {
    const __m128i even = _mm_setr_epi8(0, 1, 2, 6, 7, 8, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1);
    const __m128i odd = _mm_setr_epi8(3, 4, 5, 9, 10, 11, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1);
    for (int64_t i = 0; i < count; i += 2, row += 12, out += 6) {
        const __m128i four = load(row);
        const __m128i two = _mm_avg_epu8(_mm_shuffle_epi8(four, even), _mm_shuffle_epi8(four, odd));
        _mm_storel_epi64((__m128i *)out, two);
    }
}

AVX2 static void mirror_rgb_avx2(const byte *row, int64_t pixels, byte *out) {
    const __m128i backwards = _mm_setr_epi8(13, 14, 15, 10, 11, 12, 7, 8, 9, 4, 5, 6, 1, 2, 3, -1);
    /* Five pixels a load, with the byte before them; the byte too many is written over. */
    for (; pixels > 5; pixels -= 5, out += 15) {
        const __m128i five = _mm_shuffle_epi8(load(row + 3 * (pixels - 5) - 1), backwards);
        _mm_storeu_si128((__m128i *)out, five);
    }
    mirror(row, pixels, 3, out);
}

static int vectors(const struct batch *b) {
    return !b->portable && b->channels == 3 && __builtin_cpu_supports("avx2");
}

#else /* never called: `vectors` says so */

static int vectors(const struct batch *b) { return (void)b, 0; }
#define blend_rows_avx2 blend_rows
#define blend_rgb_avx2(row, eights, size, out) ((void)(eights))
#define halve_rgb_avx2(row, count, out) ((void)0)
#define mirror_rgb_avx2(row, pixels, out) ((void)0)

#endif

/* Zeroes the part of the hole that lies inside picture i of the batch. */
static void punch(const struct batch *b, int64_t i, byte *out) {
    if (!b->holes) return;
    const int32_t *hole = b->holes + 4 * i;
    const int64_t top = hole[0] < 0 ? 0 : hole[0], left = hole[1] < 0 ? 0 : hole[1];
    const int64_t bottom = least(b->height, (int64_t)hole[0] + hole[2]);
    const int64_t right = least(b->width, (int64_t)hole[1] + hole[3]);
    if (right <= left) return;
    const int64_t bytes = (right - left) * b->channels;
    for (int64_t y = top; y < bottom; y++)
        memset(out + (y * b->width + left) * b->channels, 0, (size_t)bytes);
}

/* Row r of the box, or the mean of the source rows that boxed row r stands for. */
static const byte *boxed_row(const byte *source, int64_t stride, int64_t r, int64_t bytes,
                             struct scratch *s, int64_t held[2]) {
    const int64_t box = s->tall.box;
    if (box == 1) return source + r * stride;
    if (held[r & 1] != r) mean_rows(source + r * box * stride, stride, box, bytes, s->boxed[r & 1]);
    held[r & 1] = r;
    return s->boxed[r & 1];
}

static inline void crop(const struct batch *b, const byte *source, int64_t stride, int64_t bytes,
                        struct scratch *s, byte *out, const int64_t channels) {
    const int fast = vectors(b);
    const int64_t box = s->wide.box;
    int64_t held[2] = {-1, -1}, asked = 0;
    for (int64_t y = 0; y < b->height; y++, out += b->width * channels) {
        const int64_t r = s->tall.first[y], next = least(r + 1, s->tall.count - 1);
        const int64_t soon = least(next + 1 + AHEAD, s->tall.count) * s->tall.box;
        for (; asked < soon; asked++) ask(source + asked * stride, bytes);
        const byte *above = boxed_row(source, stride, r, bytes, s, held);
        const byte *below = boxed_row(source, stride, next, bytes, s, held);
        (fast ? blend_rows_avx2 : blend_rows)(above, below, s->tall.weight[y], s->row, bytes);
        const byte *row = box == 1 ? s->row : s->narrow;
        if (fast && box == 2) halve_rgb_avx2(s->row, s->wide.count, s->narrow);
        else if (box > 1) mean_pixels(s->row, box, s->wide.count, channels, s->narrow);
        if (fast) blend_rgb_avx2(row, s->eights, b->width, out);
        else blend_pixels(row, &s->wide, b->width, channels, out);
    }
}

static void *take(byte **scratch, int64_t bytes) {
    byte *const taken = *scratch;
    *scratch += (bytes + 63) / 64 * 64;
    return taken;
}

/* 0, or -1 where there is no memory. Boxes are top, left, height, width. */
int pictures_resized_crop(const struct batch *b, const int32_t *boxes) {
    int64_t widest = 0;
    for (int64_t i = 0; i < b->count; i++)
        if (boxes[4 * i + 3] > widest) widest = boxes[4 * i + 3];
    const int64_t line = (widest + 1) * b->channels + PAD;
    const int64_t eights = (b->width + 7) / 8 * (int64_t)sizeof(struct eight);
    /* Zeroed: bytes behind a row's end are loaded, and then left out. */
    byte *const memory = calloc(1, (size_t)(5 * (b->height + b->width) + eights + 4 * line + 576));
    if (!memory) return -1;
    byte *rest = memory;
    struct scratch s = {
        .tall = {.first = take(&rest, 4 * b->height), .weight = take(&rest, b->height)},
        .wide = {.first = take(&rest, 4 * b->width), .weight = take(&rest, b->width)},
        .eights = take(&rest, eights),
        .boxed = {take(&rest, line), take(&rest, line)},
        .row = take(&rest, line),
        .narrow = take(&rest, line),
    };
    for (int64_t i = 0; i < b->count; i++) {
        const int32_t *box = boxes + 4 * i;
        const int64_t stride = b->widths[i] * b->channels;
        const byte *source = b->pictures[i] + box[0] * stride + box[1] * b->channels;
        byte *out = b->out + i * b->height * b->width * b->channels;
        fill_axis(&s.tall, box[2], b->height, 0);
        fill_axis(&s.wide, box[3], b->width, b->flips[i]);
        if (vectors(b)) fill_eights(s.eights, &s.wide, b->width);
        const int64_t bytes = box[3] * b->channels;
        /* Loops over a number of channels that the compiler knows are twice as fast. */
        if (b->channels == 3) crop(b, source, stride, bytes, &s, out, 3);
        else if (b->channels == 1) crop(b, source, stride, bytes, &s, out, 1);
        else crop(b, source, stride, bytes, &s, out, b->channels);
        punch(b, i, out);
    }
    free(memory);
    return 0;
}

/* Corners are top, left of a window as large as the output; zeros where the picture is not. */
int pictures_window(const struct batch *b, const int32_t *corners) {
    const int64_t channels = b->channels, line = b->width * channels;
    for (int64_t i = 0; i < b->count; i++) {
        const int64_t top = corners[2 * i], left = corners[2 * i + 1];
        const int64_t height = b->heights[i], width = b->widths[i];
        byte *const out = b->out + i * b->height * line;
        /* Columns of the window that the picture has, counted as the output's. */
        int64_t from = left < 0 ? -left : 0, to = least(b->width, width - left);
        const int64_t first = left + from, pixels = to - from;
        if (b->flips[i]) from = b->width - to, to = from + pixels;
        for (int64_t y = 0; y < b->height; y++) {
            byte *row = out + y * line;
            if (top + y < 0 || top + y >= height || pixels <= 0) {
                memset(row, 0, (size_t)line);
                continue;
            }
            const byte *span = b->pictures[i] + ((top + y) * width + first) * channels;
            byte *at = row + from * channels;
            if (top + y + AHEAD < height) ask(span + AHEAD * width * channels, pixels * channels);
            memset(row, 0, (size_t)(from * channels));
            if (!b->flips[i]) memcpy(at, span, (size_t)(pixels * channels));
            else if (vectors(b)) mirror_rgb_avx2(span, pixels, at);
            else mirror(span, pixels, channels, at);
            memset(row + to * channels, 0, (size_t)(line - to * channels));
        }
        punch(b, i, out);
    }
    return 0;
}
