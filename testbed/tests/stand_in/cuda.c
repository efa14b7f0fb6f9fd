/*
 * A stand-in for libcuda and, by another name, for libnvidia-ml: just enough of the driver's APIs for gpu-probe. Memory of a device is memory of the host; of a large block,
 * as a host may not have, only the word is kept that fills it. Kernels run as C functions of the same names, and PTX is not compiled.
 * GPUS has a GPU in each word: "UUID:BYTES", with the 32 digits of the UUID. Each process has these GPUs to itself, and NVML lists
 * this process alone. CONTEXT has the bytes that a context takes of the GPU, and LIMIT, as with HAMi-core's library, the MiB that a
 * process can have of it. As in CUDA, a context that had a fault answers every later call with the same error.
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NO_DEVICE = 100, NOT_FOUND = 500, ILLEGAL_ADDRESS = 700 };

#define MAX_GPUS 8

static struct gpu {
    unsigned char uuid[16];
    size_t bytes, used;
} gpus[MAX_GPUS];
static int n_gpus, fault;

/* A number in a variable; 0 without it. */
static size_t number(const char *variable) {
    const char *text = getenv(variable);
    return text ? (size_t)strtoull(text, NULL, 10) : 0;
}

#define LARGE ((size_t)64 << 20)
/* The only large block of the process: its address, which is not mapped, and its word. */
static const uint64_t large_block = 0x700000000000ull;
static unsigned large_word;

int cuInit(unsigned flags) {
    const char *text = getenv("GPUS");
    (void)flags;
    for (n_gpus = 0; text && *text && n_gpus < MAX_GPUS;) {
        for (int i = 0; i < 16; i++, text += 2) {
            unsigned byte = 0;
            if (sscanf(text, "%2x", &byte) != 1) return INVALID_VALUE;
            gpus[n_gpus].uuid[i] = (unsigned char)byte;
        }
        gpus[n_gpus].bytes = (size_t)strtoull(text + 1, (char **)&text, 10);
        if (number("LIMIT")) gpus[n_gpus].bytes = number("LIMIT") << 20;
        n_gpus++;
        while (*text == ' ') text++;
    }
    return n_gpus ? SUCCESS : NO_DEVICE;
}

int cuDriverGetVersion(int *version) { return *version = 13000, SUCCESS; }

int cuGetErrorName(int code, const char **name) {
    *name = code == OUT_OF_MEMORY     ? "CUDA_ERROR_OUT_OF_MEMORY"
            : code == NO_DEVICE       ? "CUDA_ERROR_NO_DEVICE"
            : code == NOT_FOUND       ? "CUDA_ERROR_NOT_FOUND"
            : code == ILLEGAL_ADDRESS ? "CUDA_ERROR_ILLEGAL_ADDRESS"
                                      : "CUDA_ERROR_INVALID_VALUE";
    return SUCCESS;
}

int cuDeviceGetCount(int *n) { return *n = n_gpus, SUCCESS; }

int cuDeviceGet(int *device, int ordinal) { return *device = ordinal, ordinal < n_gpus ? SUCCESS : INVALID_VALUE; }

int cuDeviceGetName(char *name, int n, int device) { return snprintf(name, (size_t)n, "Stand-in \"%d\"", device), SUCCESS; }

int cuDeviceGetUuid(unsigned char *uuid, int device) { return memcpy(uuid, gpus[device].uuid, 16), SUCCESS; }

int cuDeviceTotalMem_v2(size_t *bytes, int device) { return *bytes = gpus[device].bytes, SUCCESS; }

int cuDeviceGetAttribute(int *value, int attribute, int device) {
    (void)device;
    return *value = attribute == 16 ? 4 : 0, SUCCESS;
}

int cuDevicePrimaryCtxRetain(void **context, int device) {
    gpus[device].used += number("CONTEXT");
    return *context = &gpus[device], SUCCESS;
}

int cuCtxSetCurrent(void *context) { return context == &gpus[0] ? SUCCESS : INVALID_VALUE; }

int cuCtxSynchronize(void) { return fault; }

int cuMemGetInfo_v2(size_t *free_bytes, size_t *total) {
    *total = gpus[0].bytes;
    *free_bytes = gpus[0].bytes - gpus[0].used;
    return fault;
}

int cuMemAlloc_v2(uint64_t *pointer, size_t bytes) {
    if (fault) return fault;
    if (bytes > gpus[0].bytes - gpus[0].used) return OUT_OF_MEMORY;
    gpus[0].used += bytes;
    *pointer = bytes >= LARGE ? large_block : (uint64_t)(uintptr_t)malloc(bytes);
    return SUCCESS;
}

int cuMemsetD32_v2(uint64_t pointer, unsigned word, size_t n) {
    unsigned *words = (unsigned *)(uintptr_t)pointer;
    if (pointer == large_block) return large_word = word, fault;
    for (size_t i = 0; i < n; i++) words[i] = word;
    /* A word that the memory loses. */
    if (getenv("FLIPS") && n > 2) words[n / 2] ^= 1;
    return fault;
}

int cuMemcpyDtoH_v2(void *to, uint64_t pointer, size_t bytes) {
    memcpy(to, (void *)(uintptr_t)pointer, bytes);
    return fault;
}

int cuModuleLoadData(void **module, const void *image) {
    *module = (void *)image;
    return strstr(image, ".visible .entry") ? fault : INVALID_VALUE;
}

int cuModuleGetFunction(void **kernel, void *module, const char *name) {
    char entry[64];
    snprintf(entry, sizeof entry, ".entry %s(", name);
    *kernel = strstr(module, entry);
    return *kernel ? fault : NOT_FOUND;
}

int cuLaunchKernel(void *kernel, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared,
                   void *stream, void **arguments, void **extra) {
    const char *name = (const char *)kernel + strlen(".entry ");
    (void)gx, (void)gy, (void)gz, (void)bx, (void)by, (void)bz, (void)shared, (void)stream, (void)extra;
    if (fault) return fault;
    if (!strncmp(name, "sum(", 4)) {
        const unsigned *words = *(unsigned **)arguments[0];
        uint64_t n = *(uint64_t *)arguments[1], *out = *(uint64_t **)arguments[2];
        if ((uint64_t)(uintptr_t)words == large_block) *out = n * large_word;
        else for (uint64_t i = 0; i < n; i++) *out += words[i];
    } else if (!strncmp(name, "spin(", 5)) {
        nanosleep(&(struct timespec){0, 1000000}, NULL);
    } else {
        /* As in CUDA, the fault is seen when the kernel has run. */
        fault = ILLEGAL_ADDRESS;
    }
    return SUCCESS;
}

/* --- NVML: the third version of the list of processes is left out, as drivers before 510 do --- */

struct memory_v2 {
    unsigned version;
    unsigned long long total, reserved, free, used;
};

struct process_info {
    unsigned pid;
    unsigned long long bytes;
    unsigned gpu_instance, compute_instance;
};

int nvmlInit_v2(void) { return getenv("NO_NVML") ? 9 : SUCCESS; }

const char *nvmlErrorString(int code) { return code == 9 ? "Driver Not Loaded" : "Not Found"; }

int nvmlDeviceGetHandleByUUID(const char *uuid, void **device) {
    unsigned char bytes[16] = {0};
    int n = 0;
    for (const char *digit = uuid + strlen("GPU-"); *digit && n < 32; digit++) {
        unsigned value = 0;
        if (*digit == '-') continue;
        sscanf(digit, "%1x", &value);
        bytes[n / 2] = (unsigned char)(bytes[n / 2] << 4 | value);
        n++;
    }
    for (int i = 0; i < n_gpus; i++)
        if (!memcmp(gpus[i].uuid, bytes, 16)) return *device = &gpus[i], SUCCESS;
    return 6;
}

int nvmlDeviceGetMemoryInfo_v2(const struct gpu *device, struct memory_v2 *memory) {
    if (memory->version != (sizeof *memory | 2u << 24)) return 25;
    memory->total = device->bytes, memory->reserved = 0;
    memory->free = device->bytes - device->used, memory->used = device->used;
    return SUCCESS;
}

int nvmlDeviceGetComputeRunningProcesses_v2(const struct gpu *device, unsigned *n, struct process_info *processes) {
    *n = device->used > 0;
    if (*n) processes[0] = (struct process_info){.pid = (unsigned)getpid(), .bytes = device->used};
    return SUCCESS;
}
