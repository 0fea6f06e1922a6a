/* JPEGs are decoded by the libjpeg that Pillow has loaded, so that pixels are Pillow's, bit for bit.
 *
 *     rows above the window      entropy decoded, since what follows depends on them, and no more
 *     rows of the window         decoded in the columns of the window, widened to whole blocks
 *     rows below the window      never reached
 *
 * Nothing of libjpeg is linked, and no header of it is needed: `struct jpeg` begins as every version
 * of its interface does (6.2, 7 and 8), and the library itself says how long its own is. All calls
 * for one picture come from one thread; different pictures may be decoded at the same time.
 */
#define _POSIX_C_SOURCE 200809L
#include <dlfcn.h>
#include <setjmp.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MESSAGE 200 /* bytes of an error message, as libjpeg limits it */
#define MOST 4096   /* bytes that libjpeg's own struct may have; it has about 700 */
#define EDGE 2      /* columns: fancy upsampling reads the neighbour of a pixel, if there is one */
#define RGB 2
#define LINES 64

typedef uint8_t byte;

struct errors {
    void (*exit)(void *jpeg);
    void (*emit)(void *jpeg, int level);
    void (*output)(void *jpeg);
    void (*format)(void *jpeg, char *message);
    void (*reset)(void *jpeg);
    int code;
    union {
        int numbers[8];
        char text[80];
    } given;
    byte rest[256];
};

struct component {
    int id, index, wide, tall; /* the last two: sampling factors */
};

/* `jpeg_decompress_struct` up to the components. */
struct jpeg {
    struct errors *errors;
    void *memory, *progress, *client;
    int decompresses, state;
    void *source;
    uint32_t width, height;
    int components, stored_space, space;
    unsigned numerator, denominator;
    double gamma;
    int buffered, raw, dct, fancy, smoothing;
    int quantize, dither, two_pass, colors, one_pass, external, second_pass;
    uint32_t wide, tall; /* of the output */
    int out_colors, out_components, rows_at_once, colormap_size;
    byte **colormap;
    uint32_t row; /* the next one of the output */
};

struct reading {
    union {
        struct jpeg jpeg;
        byte whole[MOST];
    };
    struct errors errors;
    jmp_buf failed;
    char message[MESSAGE];
};

static struct {
    struct errors *(*std_error)(struct errors *);
    void (*CreateDecompress)(void *, int version, size_t bytes);
    void (*mem_src)(void *, const byte *, unsigned long);
    int (*read_header)(void *, int required);
    int (*start_decompress)(void *);
    void (*crop_scanline)(void *, uint32_t *left, uint32_t *wide);
    uint32_t (*skip_scanlines)(void *, uint32_t);
    uint32_t (*read_scanlines)(void *, byte **, uint32_t);
    int (*finish_decompress)(void *);
    void (*destroy_decompress)(void *);
} lib;

static int version = 62;
static size_t bytes = 1;

static void fail(void *jpeg) {
    struct reading *r = jpeg;
    r->errors.format(jpeg, r->message);
    longjmp(r->failed, 1);
}

/* A warning (level -1) says that data are damaged. */
static void warn(void *jpeg, int level) {
    if (level < 0) fail(jpeg);
}

static struct reading *new_reading(void) {
    struct reading *r = calloc(1, sizeof *r);
    if (!r) return NULL;
    r->jpeg.errors = lib.std_error(&r->errors);
    r->errors.exit = fail;
    r->errors.emit = warn;
    return r;
}

/* Find the functions in the library of this path, and in those that it has loaded. 0, or -1: there
   is no libjpeg that we know. */
int jpegs_bind(const char *path) {
    void *const library = dlopen(path, RTLD_NOW);
    if (!library) return -1;
    static const char *const names[] = {
        "jpeg_std_error", "jpeg_CreateDecompress", "jpeg_mem_src", "jpeg_read_header",
        "jpeg_start_decompress", "jpeg_crop_scanline", "jpeg_skip_scanlines",
        "jpeg_read_scanlines", "jpeg_finish_decompress", "jpeg_destroy_decompress"};
    for (size_t n = 0; n < sizeof names / sizeof *names; n++) {
        void *const function = dlsym(library, names[n]);
        if (!function) return -1;
        memcpy((byte *)&lib + n * sizeof function, &function, sizeof function);
    }
    /* It refuses a wrong version, then a wrong length, and says each time what it has. */
    for (int tries = 0; tries < 3; tries++) {
        struct reading *const r = new_reading();
        if (!r) return -1;
        const int refused = setjmp(r->failed);
        if (!refused) {
            lib.CreateDecompress(r, version, bytes);
            lib.destroy_decompress(r);
        } else if (r->errors.given.numbers[1] == version) version = r->errors.given.numbers[0];
        else bytes = (size_t)r->errors.given.numbers[0];
        free(r);
        if (!refused) return 0;
        if (bytes < sizeof(struct jpeg) && bytes != 1) return -1;
        if (bytes > MOST) return -1;
    }
    return -1;
}

void jpeg_close(struct reading *r) {
    if (!setjmp(r->failed)) lib.destroy_decompress(r);
    free(r);
}

/* Read the head. `about` becomes height, width and colour space. NULL, with a `message`: it cannot
 * be read. The data must stay until the picture is closed. */
struct reading *jpeg_open(const byte *data, int64_t size, int32_t about[3], char *message) {
    struct reading *const r = new_reading();
    if (!r) return strcpy(message, "there is no memory"), NULL;
    if (setjmp(r->failed)) {
        memcpy(message, r->message, MESSAGE);
        jpeg_close(r);
        return NULL;
    }
    lib.CreateDecompress(r, version, bytes);
    lib.mem_src(r, data, (unsigned long)size);
    lib.read_header(r, 1);
    about[0] = (int32_t)r->jpeg.height, about[1] = (int32_t)r->jpeg.width;
    about[2] = r->jpeg.stored_space;
    return r;
}

/* Decode as RGB, at `eighths` of the size, into `out`, which has room for all columns. `window` (top,
 * left, height, width) becomes what is written, row after row, which holds it. */
const char *jpeg_decode(struct reading *r, int eighths, int32_t window[4], byte *out) {
    if (setjmp(r->failed)) return r->message;
    struct jpeg *const j = &r->jpeg;
    j->space = RGB, j->numerator = (unsigned)eighths, j->denominator = 8;
    lib.start_decompress(r);
    uint32_t left = window[1] < EDGE ? 0 : (uint32_t)window[1] - EDGE;
    uint32_t right = (uint32_t)(window[1] + window[3]) + EDGE;
    if (right > j->wide) right = j->wide;
    uint32_t wide = right - left;
    if (wide < j->wide) lib.crop_scanline(r, &left, &wide);
    window[1] = (int32_t)left, window[3] = (int32_t)wide;
    if (window[0]) lib.skip_scanlines(r, (uint32_t)window[0]);
    const size_t line = 3 * (size_t)wide;
    for (const uint32_t end = j->row + (uint32_t)window[2]; j->row < end;) {
        byte *lines[LINES];
        uint32_t count = 0;
        for (; count < LINES && j->row + count < end; count++) lines[count] = out + count * line;
        out += line * lib.read_scanlines(r, lines, count);
    }
    if (j->row == j->tall) lib.finish_decompress(r);
    return NULL;
}
