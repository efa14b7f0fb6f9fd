/*
 * gpu-probe: shows the GPUs that a container sees, and uses the first of them. It prints one JSON object for each command, in the
 * order of its arguments; `work` prints one each second. After a command that fails it ends with status 1; the object of that
 * command names the call and its error.
 *
 *   gpu-probe [--dev DIR] COMMAND...
 *
 *   see              the device files of NVIDIA, NVIDIA_VISIBLE_DEVICES, the driver's library, and the GPUs by CUDA; does not fail
 *   memory           the memory of the GPU, and the time that its context took
 *   nvml             the memory of the GPU and of this program by NVML, the driver's library for administration; does not fail
 *   allocate=BYTES   allocates memory of the GPU
 *   fill             fills the allocated memory, each time with another word
 *   sum              adds up the words of the allocated memory by a kernel, and compares the sum with what `fill` has written
 *   work=SECONDS     `fill` and `sum` in turn; for ever if 0
 *   until=TIME       waits until this time, in seconds since 1970, with a context and a compiled kernel ready
 *   rate=SECONDS     launches a kernel that only computes, again and again, and counts
 *   fault            launches a kernel that writes to an address that is not mapped
 *   files=DIR        the names of the files of a directory
 *   kernel-log=TEXT  the last lines of the kernel's log that have this text; needs CAP_SYSLOG on most machines; does not fail
 *   hold=SECONDS     sleeps
 *
 * It needs neither headers nor libraries of CUDA: libcuda.so.1 and libnvidia-ml.so.1 are loaded when the first command needs them, as
 * the container's loader finds them, and the kernels are PTX, which the driver compiles. A container has one GPU in the scenarios that run this program, so
 * other GPUs are shown and not used.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <link.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/klog.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define LIBRARY "libcuda.so.1"
#define NVML_LIBRARY "libnvidia-ml.so.1"
#define MAX_FILES 256
#define MAX_NAME 512
/* CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT */
#define MULTIPROCESSORS 16
#define THREADS 256u
/* Long enough that the launch does not count: half a millisecond, on a GPU of any size. */
#define SPINS 200000ull

/* Any GPU since 2014, by any driver since version 384. */
static const char KERNELS[] =
    ".version 6.0\n"
    ".target sm_50\n"
    ".address_size 64\n"
    /* sum(words, n, out): adds the words to *out. */
    ".visible .entry sum(.param .u64 words, .param .u64 n, .param .u64 out) {\n"
    "  .reg .pred %p<2>; .reg .b32 %r<6>; .reg .b64 %rd<12>;\n"
    "  ld.param.u64 %rd1, [words]; ld.param.u64 %rd2, [n]; ld.param.u64 %rd3, [out];\n"
    "  cvta.to.global.u64 %rd1, %rd1; cvta.to.global.u64 %rd3, %rd3;\n"
    "  mov.u32 %r1, %ctaid.x; mov.u32 %r2, %ntid.x; mov.u32 %r3, %tid.x; mov.u32 %r4, %nctaid.x;\n"
    "  mul.wide.u32 %rd4, %r1, %r2; cvt.u64.u32 %rd5, %r3; add.u64 %rd4, %rd4, %rd5;\n"
    "  mul.wide.u32 %rd6, %r4, %r2; mov.u64 %rd7, 0;\n"
    "next:\n"
    "  setp.ge.u64 %p1, %rd4, %rd2; @%p1 bra done;\n"
    "  shl.b64 %rd8, %rd4, 2; add.u64 %rd9, %rd1, %rd8; ld.global.u32 %r5, [%rd9];\n"
    "  cvt.u64.u32 %rd10, %r5; add.u64 %rd7, %rd7, %rd10; add.u64 %rd4, %rd4, %rd6; bra next;\n"
    "done:\n"
    "  atom.global.add.u64 %rd11, [%rd3], %rd7; ret;\n"
    "}\n"
    /* spin(n, out): multiplies and adds n times. The store keeps the compiler from removing the loop, and is never reached. */
    ".visible .entry spin(.param .u64 n, .param .u64 out) {\n"
    "  .reg .pred %p<3>; .reg .b32 %r<2>; .reg .f32 %f<2>; .reg .b64 %rd<4>;\n"
    "  ld.param.u64 %rd1, [n]; ld.param.u64 %rd2, [out]; cvta.to.global.u64 %rd2, %rd2;\n"
    "  mov.u32 %r1, %tid.x; cvt.rn.f32.u32 %f1, %r1; mov.u64 %rd3, 0;\n"
    "again:\n"
    "  setp.ge.u64 %p1, %rd3, %rd1; @%p1 bra end;\n"
    "  fma.rn.f32 %f1, %f1, 0f3F800347, 0f3F000000; add.u64 %rd3, %rd3, 1; bra again;\n"
    "end:\n"
    "  setp.eq.f32 %p2, %f1, 0fC640E6B7; @!%p2 bra out_of_it; st.global.f32 [%rd2], %f1;\n"
    "out_of_it:\n"
    "  ret;\n"
    "}\n"
    /* fault(): writes to an address that is never mapped. */
    ".visible .entry fault() {\n"
    "  .reg .b32 %r<2>; .reg .b64 %rd<2>;\n"
    "  mov.u64 %rd1, 64; mov.u32 %r1, 1; st.global.u32 [%rd1], %r1; ret;\n"
    "}\n";

/* --- the driver's API ------------------------------------------------------------------------------------------------- */

typedef uint64_t Pointer;
typedef void *Handle;

static struct {
    int (*cuInit)(unsigned);
    int (*cuDriverGetVersion)(int *);
    int (*cuGetErrorName)(int, const char **);
    int (*cuDeviceGetCount)(int *);
    int (*cuDeviceGet)(int *, int);
    int (*cuDeviceGetName)(char *, int, int);
    int (*cuDeviceGetUuid)(unsigned char *, int);
    int (*cuDeviceGetAttribute)(int *, int, int);
    int (*cuDeviceTotalMem_v2)(size_t *, int);
    int (*cuDevicePrimaryCtxRetain)(Handle *, int);
    int (*cuCtxSetCurrent)(Handle);
    int (*cuCtxSynchronize)(void);
    int (*cuMemGetInfo_v2)(size_t *, size_t *);
    int (*cuMemAlloc_v2)(Pointer *, size_t);
    int (*cuMemsetD32_v2)(Pointer, unsigned, size_t);
    int (*cuMemcpyDtoH_v2)(void *, Pointer, size_t);
    int (*cuModuleLoadData)(Handle *, const void *);
    int (*cuModuleGetFunction)(Handle *, Handle, const char *);
    int (*cuLaunchKernel)(Handle, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, Handle, void **,
                          void **);
} cuda;

static Handle library;
/* The call that failed, its result, and the name of that or the loader's text. */
static struct failure {
    const char *call;
    int code;
    char name[MAX_NAME];
} failure;

static int fail(const char *call, int code, const char *name) {
    failure.call = call;
    failure.code = code;
    snprintf(failure.name, sizeof failure.name, "%s", name ? name : "");
    return 1;
}

/* Notes the call if it has failed. */
static int check(const char *call, int code) {
    const char *name = NULL;
    if (code == 0) return 0;
    if (cuda.cuGetErrorName) cuda.cuGetErrorName(code, &name);
    return fail(call, code, name ? name : "unknown error");
}

#define CALL(function, ...) check(#function, cuda.function(__VA_ARGS__))
#define LOAD(function) load_from(library, #function, &cuda.function, sizeof cuda.function)

static int load_from(Handle from, const char *symbol, void *function, size_t size) {
    void *found = dlsym(from, symbol);
    if (!found) return fail("dlsym", 0, dlerror());
    /* C has no conversion between pointers to objects and to functions. */
    memcpy(function, &found, size);
    return 0;
}

/* Loads the library and begins; later calls return the result of the first. */
static int start_cuda(void) {
    static int has_begun, has_failed;
    if (has_begun) return has_failed;
    has_begun = has_failed = 1;
    library = dlopen(LIBRARY, RTLD_NOW);
    if (!library) return fail("dlopen", 0, dlerror());
    if (LOAD(cuInit) || LOAD(cuDriverGetVersion) || LOAD(cuGetErrorName) || LOAD(cuDeviceGetCount) || LOAD(cuDeviceGet) ||
        LOAD(cuDeviceGetName) || LOAD(cuDeviceGetUuid) || LOAD(cuDeviceGetAttribute) || LOAD(cuDeviceTotalMem_v2) ||
        LOAD(cuDevicePrimaryCtxRetain) || LOAD(cuCtxSetCurrent) || LOAD(cuCtxSynchronize) || LOAD(cuMemGetInfo_v2) ||
        LOAD(cuMemAlloc_v2) || LOAD(cuMemsetD32_v2) || LOAD(cuMemcpyDtoH_v2) || LOAD(cuModuleLoadData) ||
        LOAD(cuModuleGetFunction) || LOAD(cuLaunchKernel))
        return 1;
    return has_failed = CALL(cuInit, 0);
}

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec / 1e9;
}

static double time_of_day(void) {
    struct timespec time;
    clock_gettime(CLOCK_REALTIME, &time);
    return (double)time.tv_sec + (double)time.tv_nsec / 1e9;
}

static void pause_for(double seconds) {
    if (seconds > 0) {
        struct timespec time = {(time_t)seconds, (long)((seconds - (double)(time_t)seconds) * 1e9)};
        nanosleep(&time, NULL);
    }
}

static int multiprocessors;
/* The time that the context took. */
static double context_seconds = -1;

/* Makes a context on the first GPU. */
static int open_context(void) {
    Handle context = NULL;
    int device = 0;
    double began = now();
    if (context_seconds >= 0) return 0;
    if (start_cuda() || CALL(cuDeviceGet, &device, 0) ||
        CALL(cuDeviceGetAttribute, &multiprocessors, MULTIPROCESSORS, device) ||
        CALL(cuDevicePrimaryCtxRetain, &context, device) || CALL(cuCtxSetCurrent, context))
        return 1;
    context_seconds = now() - began;
    return 0;
}

/* Finds a kernel; the driver compiles them all when the first one is needed. */
static int find_kernel(const char *name, Handle *kernel) {
    static Handle module;
    if (open_context() || (!module && CALL(cuModuleLoadData, &module, KERNELS))) return 1;
    return CALL(cuModuleGetFunction, kernel, module, name);
}

/* Runs a kernel on the whole GPU to its end. */
static int run_kernel(Handle kernel, void **arguments) {
    unsigned blocks = multiprocessors > 0 ? 2 * (unsigned)multiprocessors : 2;
    if (CALL(cuLaunchKernel, kernel, blocks, 1, 1, THREADS, 1, 1, 0, NULL, arguments, NULL)) return 1;
    return CALL(cuCtxSynchronize);
}

/* --- JSON ------------------------------------------------------------------------------------------------------------- */

static void print_text(const char *text) {
    putchar('"');
    for (; *text; text++) {
        unsigned char c = (unsigned char)*text;
        if (c == '"' || c == '\\') printf("\\%c", c);
        else if (c < 0x20) printf("\\u%04x", c);
        else putchar(c);
    }
    putchar('"');
}

static void print_list(const char *key, char (*names)[MAX_NAME], int n) {
    printf(",\"%s\":[", key);
    for (int i = 0; i < n; i++) {
        if (i) putchar(',');
        print_text(names[i]);
    }
    putchar(']');
}

static void begin(const char *command) {
    printf("{\"command\":");
    print_text(command);
}

static void print(const char *format, ...) {
    va_list values;
    va_start(values, format);
    vprintf(format, values);
    va_end(values);
}

/* Ends the object of a command, with the error if it has failed. */
static int end(int has_failed) {
    if (has_failed) {
        printf(",\"error\":{\"call\":");
        print_text(failure.call);
        printf(",\"code\":%d,\"name\":", failure.code);
        print_text(failure.name);
        putchar('}');
    }
    printf("}\n");
    fflush(stdout);
    return has_failed;
}

/* --- commands --------------------------------------------------------------------------------------------------------- */

static const char *dev = "/dev";

/* The path of a file of a directory; a longer one is cut, and then not found. */
static void join(char path[2 * MAX_NAME], const char *dir, const char *name) {
    snprintf(path, 2 * MAX_NAME, "%.*s/%.*s", MAX_NAME - 1, dir, MAX_NAME - 1, name);
}

static int by_name(const void *a, const void *b) { return strcmp(a, b); }

/* Adds the files below a directory whose names begin with a prefix; those of its directories are named with their path. */
static int list_files(const char *dir, const char *below, const char *prefix, char (*names)[MAX_NAME], int n) {
    DIR *opened = opendir(dir);
    struct dirent *entry;
    if (!opened) return n;
    while (n < MAX_FILES && (entry = readdir(opened))) {
        char path[2 * MAX_NAME], name[2 * MAX_NAME];
        struct stat status;
        if (entry->d_name[0] == '.' || strncmp(entry->d_name, prefix, strlen(prefix)) != 0) continue;
        join(path, dir, entry->d_name);
        snprintf(name, sizeof name, "%.*s%.*s", MAX_NAME - 1, below, MAX_NAME - 1, entry->d_name);
        if (stat(path, &status) == 0 && S_ISDIR(status.st_mode)) {
            strncat(name, "/", sizeof name - strlen(name) - 1);
            n = list_files(path, name, "", names, n);
        } else {
            snprintf(names[n++], MAX_NAME, "%.*s", MAX_NAME - 1, name);
        }
    }
    closedir(opened);
    return n;
}

/* The UUID of a GPU, in the form of NVML. */
static int uuid_of(char text[MAX_NAME], int device) {
    unsigned char uuid[16] = {0};
    int has_failed = CALL(cuDeviceGetUuid, uuid, device);
    char *end = text + sprintf(text, "GPU-");
    for (int i = 0; i < 16; i++) end += sprintf(end, "%s%02x", i == 4 || i == 6 || i == 8 || i == 10 ? "-" : "", uuid[i]);
    return has_failed;
}

static void print_device(int device) {
    char uuid[MAX_NAME], name[MAX_NAME] = "";
    size_t bytes = 0;
    int has_failed = uuid_of(uuid, device) || CALL(cuDeviceGetName, name, sizeof name, device) ||
                     CALL(cuDeviceTotalMem_v2, &bytes, device);
    printf("{\"uuid\":");
    print_text(uuid);
    printf(",\"name\":");
    print_text(name);
    printf(",\"bytes\":%zu", bytes);
    if (has_failed) {
        printf(",\"failed\":");
        print_text(failure.call);
    }
    putchar('}');
}

static void print_devices(int n) {
    printf(",\"devices\":[");
    for (int i = 0; i < n; i++) {
        int device = 0;
        if (CALL(cuDeviceGet, &device, i)) break;
        if (i) putchar(',');
        print_device(device);
    }
    putchar(']');
}

static int see(void) {
    static char files[MAX_FILES][MAX_NAME], denied[MAX_FILES][MAX_NAME];
    const char *variable = getenv("NVIDIA_VISIBLE_DEVICES");
    struct link_map *loaded = NULL;
    int n_denied = 0, n_files = list_files(dev, "", "nvidia", files, 0), n_devices = 0, version = 0, has_failed;
    qsort(files, (size_t)n_files, sizeof files[0], by_name);
    for (int i = 0; i < n_files; i++) {
        char path[2 * MAX_NAME];
        join(path, dev, files[i]);
        /* A file that the container's cgroup does not allow is there, and cannot be opened. */
        int opened = open(path, O_RDWR | O_CLOEXEC);
        if (opened < 0) memcpy(denied[n_denied++], files[i], MAX_NAME);
        else close(opened);
    }
    begin("see");
    if (variable) {
        printf(",\"variable\":");
        print_text(variable);
    }
    print_list("deviceFiles", files, n_files);
    print_list("deniedFiles", denied, n_denied);
    has_failed = start_cuda() || CALL(cuDriverGetVersion, &version) || CALL(cuDeviceGetCount, &n_devices);
    if (library && dlinfo(library, RTLD_DI_LINKMAP, &loaded) == 0 && loaded) {
        printf(",\"library\":");
        print_text(loaded->l_name);
    }
    if (!has_failed) {
        printf(",\"cudaVersion\":\"%d.%d\"", version / 1000, version % 1000 / 10);
        print_devices(n_devices);
    }
    end(has_failed);
    return 0;
}

static int memory(void) {
    size_t free_bytes = 0, total_bytes = 0;
    int has_failed = open_context() || CALL(cuMemGetInfo_v2, &free_bytes, &total_bytes);
    begin("memory");
    if (!has_failed)
        print(",\"contextMilliseconds\":%.1f,\"freeBytes\":%zu,\"totalBytes\":%zu", context_seconds * 1e3, free_bytes,
              total_bytes);
    return end(has_failed);
}

static Pointer allocated;
static size_t n_words;
static unsigned word;

static int allocate(double bytes) {
    int has_failed;
    n_words = (size_t)bytes / sizeof(unsigned);
    has_failed = open_context() || CALL(cuMemAlloc_v2, &allocated, n_words * sizeof(unsigned));
    begin("allocate");
    print(",\"bytes\":%zu", n_words * sizeof(unsigned));
    return end(has_failed);
}

static int fill_once(void) {
    word = word % 7 + 1;
    if (!allocated) return fail("fill", 0, "nothing is allocated");
    return CALL(cuMemsetD32_v2, allocated, word, n_words) || CALL(cuCtxSynchronize);
}

static int fill(void) {
    int has_failed = fill_once();
    begin("fill");
    print(",\"word\":%u", word);
    return end(has_failed);
}

/* Adds up the words; returns nonzero if a call fails. */
static int add_up(uint64_t *sum) {
    static Handle kernel;
    static Pointer out;
    uint64_t n = n_words;
    void *arguments[] = {&allocated, &n, &out};
    *sum = 0;
    if (!allocated) return fail("sum", 0, "nothing is allocated");
    if (!kernel && (find_kernel("sum", &kernel) || CALL(cuMemAlloc_v2, &out, sizeof *sum))) return 1;
    return CALL(cuMemsetD32_v2, out, 0, 2) || run_kernel(kernel, arguments) ||
           CALL(cuMemcpyDtoH_v2, sum, out, sizeof *sum);
}

static int sum(void) {
    uint64_t found, expected = (uint64_t)n_words * word;
    int has_failed = add_up(&found);
    begin("sum");
    if (!has_failed) {
        print(",\"sum\":%llu,\"expected\":%llu", (unsigned long long)found, (unsigned long long)expected);
        if (found != expected) has_failed = fail("sum", 0, "the memory has other words than were written");
    }
    return end(has_failed);
}

static int work(double seconds) {
    unsigned long rounds = 0, wrong = 0;
    double ends = now() + seconds, printed = 0;
    int has_failed = 0;
    while (!has_failed && (rounds == 0 || seconds <= 0 || now() < ends)) {
        uint64_t found = 0;
        has_failed = fill_once() || add_up(&found);
        if (!has_failed) {
            rounds++;
            wrong += found != (uint64_t)n_words * word;
        }
        if (has_failed || now() - printed >= 1) {
            printed = now();
            begin("work");
            print(",\"rounds\":%lu,\"wrong\":%lu", rounds, wrong);
            end(has_failed);
        }
        pause_for(0.05);
    }
    return has_failed || wrong > 0;
}

static Handle spin_kernel;

/* One launch of the kernel that only computes. */
static int spin_once(void) {
    static Pointer out;
    uint64_t spins = SPINS;
    void *arguments[] = {&spins, &out};
    if (!spin_kernel && (find_kernel("spin", &spin_kernel) || CALL(cuMemAlloc_v2, &out, sizeof(float)))) return 1;
    return run_kernel(spin_kernel, arguments);
}

static int until(double time) {
    /* The first launch is slower than the ones that count. */
    int has_failed = spin_once();
    double early = time - time_of_day();
    pause_for(early);
    begin("until");
    print(",\"lateSeconds\":%.3f", early < 0 ? -early : 0);
    return end(has_failed);
}

static int rate(double seconds) {
    double began = now(), longest = 0, took;
    unsigned long kernels = 0;
    int has_failed = 0;
    while (!has_failed && (kernels == 0 || now() - began < seconds)) {
        double launched = now();
        has_failed = spin_once();
        if (now() - launched > longest) longest = now() - launched;
        kernels += !has_failed;
    }
    took = now() - began;
    begin("rate");
    print(",\"kernels\":%lu,\"perSecond\":%.1f,\"longestMilliseconds\":%.2f", kernels, (double)kernels / took,
          longest * 1e3);
    return end(has_failed);
}

static int fault(void) {
    Handle kernel = NULL;
    int has_failed = find_kernel("fault", &kernel) || run_kernel(kernel, NULL);
    begin("fault");
    return end(has_failed);
}

static int show_files(const char *dir) {
    static char names[MAX_FILES][MAX_NAME];
    DIR *opened = opendir(dir);
    int n = 0, has_failed = opened ? 0 : fail("opendir", errno, strerror(errno));
    if (opened) {
        closedir(opened);
        n = list_files(dir, "", "", names, 0);
        qsort(names, (size_t)n, sizeof names[0], by_name);
    }
    begin("files");
    print_list("names", names, n);
    return end(has_failed);
}

static int hold(double seconds) {
    begin("hold");
    end(0);
    pause_for(seconds);
    return 0;
}

/* --- NVML ------------------------------------------------------------------------------------------------------------- */

/* nvmlMemory_v2_t; used does not count what the driver keeps, unlike in the first version. */
struct memory_v2 {
    unsigned version;
    unsigned long long total, reserved, free, used;
};

/* nvmlProcessInfo_t, since its second version. */
struct process_info {
    unsigned pid;
    unsigned long long bytes;
    unsigned gpu_instance, compute_instance;
};

#define NVML_NOT_AVAILABLE (~0ull)
#define MAX_PROCESSES 1024

static struct {
    int (*nvmlInit_v2)(void);
    const char *(*nvmlErrorString)(int);
    int (*nvmlDeviceGetHandleByUUID)(const char *, Handle *);
    int (*nvmlDeviceGetMemoryInfo_v2)(Handle, struct memory_v2 *);
    int (*nvmlDeviceGetComputeRunningProcesses)(Handle, unsigned *, struct process_info *);
} nvml_api;

#define NVML_CALL(function, ...) check_nvml(#function, nvml_api.function(__VA_ARGS__))

static int check_nvml(const char *call, int code) {
    if (code == 0) return 0;
    return fail(call, code, nvml_api.nvmlErrorString ? nvml_api.nvmlErrorString(code) : "unknown error");
}

/* Loads the library, and begins. */
static int open_nvml(void) {
    Handle nvml_library = dlopen(NVML_LIBRARY, RTLD_NOW);
    if (!nvml_library) return fail("dlopen", 0, dlerror());
#define LOAD_NVML(symbol, function) load_from(nvml_library, symbol, &nvml_api.function, sizeof nvml_api.function)
    if (LOAD_NVML("nvmlInit_v2", nvmlInit_v2) || LOAD_NVML("nvmlErrorString", nvmlErrorString) ||
        LOAD_NVML("nvmlDeviceGetHandleByUUID", nvmlDeviceGetHandleByUUID) ||
        LOAD_NVML("nvmlDeviceGetMemoryInfo_v2", nvmlDeviceGetMemoryInfo_v2))
        return 1;
    /* The third version has the structure of the second. */
    if (LOAD_NVML("nvmlDeviceGetComputeRunningProcesses_v3", nvmlDeviceGetComputeRunningProcesses) &&
        LOAD_NVML("nvmlDeviceGetComputeRunningProcesses_v2", nvmlDeviceGetComputeRunningProcesses))
        return 1;
    return NVML_CALL(nvmlInit_v2);
}

/* Later calls return the result of the first. */
static int start_nvml(void) {
    static int has_begun, has_failed;
    static struct failure first;
    if (!has_begun) {
        has_begun = 1;
        has_failed = open_nvml();
        first = failure;
    }
    if (has_failed) failure = first;
    return has_failed;
}

/* The memory of this program, if NVML lists it: in a container NVML has the process IDs of the container. */
static int own_memory(Handle device, unsigned long long *bytes, unsigned *n_processes) {
    static struct process_info processes[MAX_PROCESSES];
    *n_processes = MAX_PROCESSES;
    *bytes = NVML_NOT_AVAILABLE;
    if (NVML_CALL(nvmlDeviceGetComputeRunningProcesses, device, n_processes, processes)) return 1;
    for (unsigned i = 0; i < *n_processes; i++)
        if (processes[i].pid == (unsigned)getpid() && processes[i].bytes != NVML_NOT_AVAILABLE)
            *bytes = processes[i].bytes + (*bytes == NVML_NOT_AVAILABLE ? 0 : *bytes);
    return 0;
}

static int nvml(void) {
    struct memory_v2 memory = {.version = sizeof memory | 2u << 24};
    char uuid[MAX_NAME];
    Handle device = NULL;
    unsigned long long bytes = NVML_NOT_AVAILABLE;
    unsigned n_processes = 0;
    int first = 0, has_failed = start_cuda() || CALL(cuDeviceGet, &first, 0) || uuid_of(uuid, first) || start_nvml() ||
                                NVML_CALL(nvmlDeviceGetHandleByUUID, uuid, &device) ||
                                NVML_CALL(nvmlDeviceGetMemoryInfo_v2, device, &memory);
    begin("nvml");
    if (!has_failed) {
        print(",\"totalBytes\":%llu,\"reservedBytes\":%llu,\"usedBytes\":%llu", memory.total, memory.reserved, memory.used);
        has_failed = own_memory(device, &bytes, &n_processes);
        if (!has_failed) print(",\"processes\":%u", n_processes);
        if (bytes != NVML_NOT_AVAILABLE) print(",\"ownBytes\":%llu", bytes);
    }
    end(has_failed);
    return 0;
}

/* --- the kernel's log ------------------------------------------------------------------------------------------------- */

/* klogctl(2) has these numbers alone. */
enum { READ_ALL = 3, SIZE_OF_BUFFER = 10 };
#define MAX_LINES 20

static int kernel_log(const char *text) {
    static char lines[MAX_LINES][MAX_NAME];
    int size = klogctl(SIZE_OF_BUFFER, NULL, 0), n = 0, read = -1, n_lines = 0, has_failed = 0;
    char *buffer = size > 0 ? malloc((size_t)size + 1) : NULL;
    if (buffer) read = klogctl(READ_ALL, buffer, size);
    if (read < 0) has_failed = fail("klogctl", errno, strerror(errno));
    if (read >= 0) {
        buffer[read] = 0;
        for (char *line = strtok(buffer, "\n"); line; line = strtok(NULL, "\n"))
            if (strstr(line, text)) snprintf(lines[n++ % MAX_LINES], MAX_NAME, "%s", line);
    }
    n_lines = n < MAX_LINES ? n : MAX_LINES;
    begin("kernel-log");
    print(",\"lines\":[");
    for (int i = n - n_lines; i < n; i++) {
        if (i > n - n_lines) print(",");
        print_text(lines[i % MAX_LINES]);
    }
    print("]");
    free(buffer);
    end(has_failed);
    return 0;
}

/* --- the command line ------------------------------------------------------------------------------------------------- */

/* The value of an argument of this name; NULL if it is another one. */
static const char *value_of(const char *argument, const char *name) {
    size_t n = strlen(name);
    return strncmp(argument, name, n) == 0 && argument[n] == '=' ? argument + n + 1 : NULL;
}

static int run(const char *argument) {
    const char *value;
    if (!strcmp(argument, "see")) return see();
    if (!strcmp(argument, "memory")) return memory();
    if (!strcmp(argument, "nvml")) return nvml();
    if (!strcmp(argument, "fill")) return fill();
    if (!strcmp(argument, "sum")) return sum();
    if (!strcmp(argument, "fault")) return fault();
    if ((value = value_of(argument, "allocate"))) return allocate(atof(value));
    if ((value = value_of(argument, "work"))) return work(atof(value));
    if ((value = value_of(argument, "until"))) return until(atof(value));
    if ((value = value_of(argument, "rate"))) return rate(atof(value));
    if ((value = value_of(argument, "files"))) return show_files(value);
    if ((value = value_of(argument, "kernel-log"))) return kernel_log(value);
    if ((value = value_of(argument, "hold"))) return hold(atof(value));
    return -1;
}

static void stop(int signal) {
    (void)signal;
    _exit(0);
}

int main(int n, char **arguments) {
    int first = 1;
    /* The kernel drops signals for the first process of a container that it does not handle. */
    signal(SIGTERM, stop);
    if (n > 2 && !strcmp(arguments[1], "--dev")) {
        dev = arguments[2];
        first = 3;
    }
    if (first >= n) {
        fprintf(stderr, "usage: gpu-probe [--dev DIR] COMMAND...\n");
        return 2;
    }
    for (int i = first; i < n; i++) {
        int result = run(arguments[i]);
        if (result < 0) {
            fprintf(stderr, "gpu-probe: there is no command %s\n", arguments[i]);
            return 2;
        }
        if (result > 0) return 1;
    }
    return 0;
}
