/* Pillow's antialiased resize of RGB, bit for bit, where it will be seen and nowhere else.
 *
 *     source (a part of a picture)      a ring of rows              out: a window of the result
 *     +-------------------+                                           +------+
 *     |   row r  ~~~~~~~  |  columns    +--------+       rows         |      |
 *     |                   | ----------> |~~~~~~~~| ---------------->  |~~~~~~|
 *     +-------------------+  weighed    +--------+       weighed      +------+
 *
 * Along each axis an output pixel is a weighted sum of the pixels that its filter covers. Weights
 * are integers (22 bits after the point), sums are rounded to bytes after the first axis and after
 * the second one. So all that could differ from Pillow is the weights, and those are computed in
 * doubles by the same steps as there. Python looks at a few pictures before it trusts this
 * (`loaders/pixels/resizing.py`), and checks what it passes. There is no state: any number of
 * threads may call at the same time.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef uint8_t byte;

/* The same fields as `_ResizeCall` in resizing.py. */
struct resizing {
    const byte *source;     /* rows without gaps */
    int32_t part[4];        /* which box of the picture `source` is: top, left, height, width */
    int32_t whole[2];       /* height and width of the picture */
    int32_t size[2];        /* height and width of the result, of which ... */
    int32_t window[4];      /* ... this box is computed */
    int32_t cubic;          /* 1: bicubic, 0: bilinear */
    byte *out;
};

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#define AVX2 __attribute__((target("avx2")))
#define POINT 22
#define LOW 11 /* bits of the lower part of a weight: both parts fit into 16 bits */

/* One axis of the window: output i is the sum of `taps` source pixels from first[i] on, times its
   weights. What its filter does not cover has a weight of zero. */
struct axis {
    int64_t taps; /* rows: even, columns: a multiple of four */
    int32_t *first;
    int32_t *weights; /* two neighbours: their upper halves, then their lower ones */
};

static double covered(double x, int cubic) {
    const double a = -0.5;
    if (x < 0) x = -x;
    if (!cubic) return x < 1 ? 1 - x : 0;
    if (x < 1) return ((a + 2) * x - (a + 3)) * x * x + 1;
    return x < 2 ? (((x - 5) * x + 8) * x - 4) * a : 0;
}

/* The pixels that a filter may cover, rounded up to a multiple. */
static int64_t most_taps(int32_t whole, int32_t size, int cubic, int64_t multiple) {
    const double scale = (double)whole / size, reach = (cubic ? 2 : 1) * (scale < 1 ? 1 : scale);
    return ((int64_t)(2 * reach) + multiple) / multiple * multiple;
}

/* Fill an axis for `count` outputs from `from` on. Places in the source count from `begin`. -1: an
   output is outside of the result, or needs more than the source. */
static int fill_axis(struct axis *axis, int32_t whole, int32_t size, int32_t from, int32_t count,
                     int32_t begin, int32_t length, int cubic, double *exact) {
    const double scale = (double)whole / size, stretch = scale < 1 ? 1 : scale;
    const double support = (cubic ? 2.0 : 1.0) * stretch, shrink = 1.0 / stretch;
    if (from < 0 || count > size - from) return -1;
    for (int64_t i = 0; i < count; i++) {
        const double centre = ((double)(from + i) + 0.5) * scale;
        int32_t low = (int32_t)(centre - support + 0.5), high = (int32_t)(centre + support + 0.5);
        if (low < 0) low = 0;
        if (high > whole) high = whole;
        if (low < begin || high > begin + length || high - low > axis->taps) return -1;
        double sum = 0;
        for (int32_t k = 0; k < high - low; k++)
            sum += exact[k] = covered((k + low - centre + 0.5) * shrink, cubic);
        int32_t *const weights = axis->weights + i * axis->taps;
        memset(weights, 0, (size_t)axis->taps * sizeof *weights);
        for (int32_t k = 0; k < high - low; k++) {
            const double share = sum != 0 ? exact[k] / sum : exact[k];
            weights[k] = (int32_t)((share < 0 ? -0.5 : 0.5) + share * (1 << POINT));
        }
        axis->first[i] = low - begin;
    }
    return 0;
}

/* A row of RGB to `count` pixels, by four source pixels at a time: two in each half of a register.
   Sums of both halves, and of the weights' halves, are put together before anything is rounded. */
AVX2 static void weigh_columns(const byte *row, const struct axis *axis, int64_t count, byte *out) {
    const __m256i pairs = _mm256_setr_epi8(
        0, -1, 3, -1, 1, -1, 4, -1, 2, -1, 5, -1, -1, -1, -1, -1,
        6, -1, 9, -1, 7, -1, 10, -1, 8, -1, 11, -1, -1, -1, -1, -1);
    const __m256i upper = _mm256_set_epi64x(0x0b0a09080b0a0908, 0x0b0a09080b0a0908,
                                            0x0302010003020100, 0x0302010003020100);
    const __m256i lower = _mm256_add_epi8(upper, _mm256_set1_epi8(4));
    const __m256i quarter = _mm256_set1_epi32(1 << (POINT - 2)); /* of a level, in each half */
    const int64_t taps = axis->taps;
    const int32_t *weight = axis->weights, *first = axis->first;
    for (byte *const end = out + 3 * count; out < end; out += 3) {
        const byte *at = row + 3 * *first++;
        __m256i high = _mm256_setzero_si256(), low = quarter;
        for (const int32_t *const next = weight + taps; weight < next; at += 12, weight += 4) {
            const __m256i pixels = _mm256_broadcastsi128_si256(_mm_loadu_si128((const void *)at));
            const __m256i four = _mm256_broadcastsi128_si256(_mm_loadu_si128((const void *)weight));
            const __m256i two = _mm256_shuffle_epi8(pixels, pairs);
            high = _mm256_add_epi32(high, _mm256_madd_epi16(two, _mm256_shuffle_epi8(four, upper)));
            low = _mm256_add_epi32(low, _mm256_madd_epi16(two, _mm256_shuffle_epi8(four, lower)));
        }
        const __m256i both = _mm256_add_epi32(_mm256_slli_epi32(high, LOW), low);
        __m128i sum = _mm256_extracti128_si256(both, 1);
        sum = _mm_srai_epi32(_mm_add_epi32(_mm256_castsi256_si128(both), sum), POINT);
        sum = _mm_packs_epi32(sum, sum);
        const int pixel = _mm_cvtsi128_si32(_mm_packus_epi16(sum, sum));
        memcpy(out, &pixel, 4); /* the byte too many is written over, or behind the row */
    }
}

/* Two weights become their upper halves side by side, and their lower halves: those fit into 16
   bits, as the instructions that add two products need it. */
static void split(struct axis *axis, int64_t count) {
    for (int32_t *pair = axis->weights; pair < axis->weights + count * axis->taps; pair += 2) {
        const int32_t a = pair[0], b = pair[1], mask = (1 << LOW) - 1;
        pair[0] = (int32_t)((uint32_t)(b >> LOW) << 16 | (uint16_t)(a >> LOW));
        pair[1] = (b & mask) << 16 | (a & mask);
    }
}

/* As many rows of `bytes` to one. A row has eight bytes more, which are read and left out. */
AVX2 static void weigh_rows(const byte *const *rows, const int32_t *weights, int64_t taps,
                            int64_t bytes, byte *out) {
    const __m256i half = _mm256_set1_epi32(1 << (POINT - 1));
    for (int64_t i = 0; i < bytes; i += 8) {
        __m256i high = _mm256_setzero_si256(), low = half;
        for (int64_t k = 0; k < taps; k += 2) {
            const __m128i one = _mm_loadl_epi64((const __m128i *)(rows[k] + i));
            const __m128i next = _mm_loadl_epi64((const __m128i *)(rows[k + 1] + i));
            const __m256i two = _mm256_cvtepu8_epi16(_mm_unpacklo_epi8(one, next));
            high = _mm256_add_epi32(high, _mm256_madd_epi16(two, _mm256_set1_epi32(weights[k])));
            low = _mm256_add_epi32(low, _mm256_madd_epi16(two, _mm256_set1_epi32(weights[k + 1])));
        }
        __m256i sum = _mm256_add_epi32(_mm256_slli_epi32(high, LOW), low);
        sum = _mm256_srai_epi32(sum, POINT);
        sum = _mm256_packs_epi32(sum, sum);
        sum = _mm256_permutevar8x32_epi32(_mm256_packus_epi16(sum, sum),
                                          _mm256_setr_epi32(0, 4, 0, 4, 0, 4, 0, 4));
        const int64_t eight = _mm_cvtsi128_si64(_mm256_castsi256_si128(sum));
        memcpy(out + i, &eight, (size_t)(bytes - i < 8 ? bytes - i : 8));
    }
}

/* The memory of one call. */
struct scratch {
    int32_t *numbers;  /* of both axes */
    double *exact;     /* the weights of one output */
    byte *ring, *row; /* the second: one row of the source, with `behind` bytes behind it */
    const byte **rows;
};

static int resize(const struct resizing *r, struct axis *tall, struct axis *wide,
                  struct scratch *s, int64_t line, int64_t behind) {
    const int32_t *const part = r->part, *const window = r->window;
    const int64_t height = window[2], width = window[3], taps = tall->taps, bytes = 3 * part[3];
    tall->first = s->numbers, tall->weights = tall->first + height;
    wide->first = tall->weights + height * taps, wide->weights = wide->first + width;
    if (fill_axis(tall, r->whole[0], r->size[0], window[0], window[2], part[0], part[2], r->cubic,
                  s->exact) ||
        fill_axis(wide, r->whole[1], r->size[1], window[1], window[3], part[1], part[3], r->cubic,
                  s->exact))
        return -2;
    split(tall, height), split(wide, width);
    byte *out = r->out;
    int64_t done = tall->first[0];
    for (int64_t y = 0; y < height; y++, out += 3 * width) {
        const int64_t first = tall->first[y];
        if (done < first) done = first;
        for (; done < first + taps && done < part[2]; done++) {
            const byte *row = r->source + done * bytes;
            if ((part[2] - done - 1) * bytes < behind) row = memcpy(s->row, row, (size_t)bytes);
            weigh_columns(row, wide, width, s->ring + done % taps * line);
        }
        for (int64_t k = 0; k < taps; k++) s->rows[k] = s->ring + (first + k) % taps * line;
        weigh_rows(s->rows, tall->weights + y * taps, taps, 3 * width, out);
    }
    return 0;
}

/* 0; or -1: there is no memory, -2: the window reaches out of the result, or needs more than
   the part, -3: this processor has no AVX2. */
int pictures_resize(const struct resizing *r) {
    if (!__builtin_cpu_supports("avx2")) return -3;
    const int64_t height = r->window[2], width = r->window[3];
    struct axis tall = {.taps = most_taps(r->whole[0], r->size[0], r->cubic, 2)};
    struct axis wide = {.taps = most_taps(r->whole[1], r->size[1], r->cubic, 4)};
    const int64_t line = 3 * width + 8;
    const int64_t behind = 3 * wide.taps + 8; /* bytes that may be read behind a row */
    const int64_t most = tall.taps > wide.taps ? tall.taps : wide.taps;
    struct scratch s = {
        .numbers = malloc(4 * (size_t)(height * (tall.taps + 1) + width * (wide.taps + 1))),
        .exact = malloc((size_t)most * sizeof(double)),
        .ring = calloc((size_t)tall.taps, (size_t)line),
        .row = calloc(1, (size_t)(3 * r->part[3] + behind)),
        .rows = malloc((size_t)tall.taps * sizeof *s.rows),
    };
    const int all = s.numbers && s.exact && s.ring && s.row && s.rows;
    const int failed = all ? resize(r, &tall, &wide, &s, line, behind) : -1;
    free(s.numbers), free(s.exact), free(s.ring), free(s.row), free(s.rows);
    return failed;
}

#else

int pictures_resize(const struct resizing *r) { return (void)r, -3; }

#endif
