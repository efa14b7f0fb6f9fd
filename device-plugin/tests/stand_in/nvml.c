/*
 * A stand-in for libnvidia-ml: just enough of NVML for the inventory's tests, loaded through the same
 * dynamic path as the real library. It drives no hardware and knows no unit or clock call. Compiled with WITHOUT_NEW_SYMBOLS
 * it lacks the functions that drivers gained later: the list of processes, and the limits of memory.
 *
 * It lives on files in its own directory, so that every test has its own machine:
 *
 *   devices        one device per line, replaced as a whole by the test:
 *                    <handle> <uuid> <minor> <memory bytes> <mig 0|1> <events 0|1|2> <code> <bus id> <model>
 *                  A nonzero code is what every call about the device answers (15: lost, 999: unknown).
 *                  events: 0 none are supported, 1 XIDs, 2 XIDs are promised and registration fails.
 *                  A minor of 4294967295 is NOT_SUPPORTED, and so is a memory of 18446744073709551615.
 *   init           if it exists, the number nvmlInit answers.
 *   reserved       if it exists, the bytes that the driver reserves on each device.
 *   fields         values of nvmlDeviceGetFieldValues, one per line: "<handle> <field> <value>"; others are not supported.
 *   wait           if it exists, the number that waiting for events answers at once.
 *   hang           as long as it exists, no call about a device returns.
 *   events-queue/  one event per file, in name order: "<handle> <type> <data>"; removed when delivered.
 *                  Handle -1 is an event without a device, 100 and above one nobody registered.
 *   links          one NVLink per line: "<handle> <link> <active 0|1> <bus id of the far end>".
 *   processes      one process per line: "<handle> <pid> <bytes>"; the number that stands for unknown memory is 18446744073709551615.
 *   memory-limits  one limit per line: "<handle> <cgroup's directory> <soft> <hard> <used> <code>"; without the file, limits are not
 *                  supported.
 *   calls          what was called, appended by the library.
 *
 * Like NVML it lists the devices that exist when a session begins, and a device that was lost in a
 * session stays lost in it, also when it is back.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum {
    SUCCESS = 0,
    UNINITIALIZED = 1,
    INVALID_ARGUMENT = 2,
    NOT_SUPPORTED = 3,
    NOT_FOUND = 6,
    INSUFFICIENT_SIZE = 7,
    TIMEOUT = 10,
    LOST = 15,
    VERSION_MISMATCH = 25,
};

#define MAX_DEVICES 16
#define UNSUPPORTED_MINOR 4294967295u
#define UNSUPPORTED_MEMORY 18446744073709551615ull
#define XID_CRITICAL 8ULL

typedef struct {
    int handle;
    char uuid[96];
    unsigned minor;
    unsigned long long memory;
    unsigned mig;
    unsigned events;
    int code;
    char bus_id[32];
    char model[96];
} device_t;

/* What nvml.h calls nvmlPciInfo_t, nvmlMemory_t, nvmlMemory_v2_t and nvmlEventData_t. */
typedef struct {
    char bus_id_legacy[16];
    unsigned domain, bus, device, device_id, subsystem_id;
    char bus_id[32];
} pci_info_t;

typedef struct {
    unsigned long long total, free, used;
} memory_t;

typedef struct {
    unsigned version;
    unsigned long long total, reserved, free, used;
} memory_v2_t;

typedef struct {
    void *device;
    unsigned long long type, data;
    unsigned gpu_instance, compute_instance;
} event_data_t;

typedef struct {
    int n_handles;
    int handles[MAX_DEVICES];
} event_set_t;

/* The session: the devices that it listed, and whether they were lost in it. */
static int n_inits;
static int n_listed;
static int listed[MAX_DEVICES];
static char listed_uuid[MAX_DEVICES][96];
static int was_lost[MAX_DEVICES];

static void in_own_folder(char *path, size_t size, const char *name) {
    Dl_info info;
    dladdr((void *)in_own_folder, &info);
    const char *end = strrchr(info.dli_fname, '/');
    snprintf(path, size, "%.*s/%s", (int)(end - info.dli_fname), info.dli_fname, name);
}

static void record(const char *format, ...) {
    char path[4096];
    in_own_folder(path, sizeof path, "calls");
    FILE *file = fopen(path, "a");
    if (!file) return;
    va_list args;
    va_start(args, format);
    vfprintf(file, format, args);
    va_end(args);
    fputc('\n', file);
    fclose(file);
}

static int read_devices(device_t *devices) {
    char path[4096], line[512];
    in_own_folder(path, sizeof path, "devices");
    FILE *file = fopen(path, "r");
    int n = 0;
    if (!file) return 0;
    while (n < MAX_DEVICES && fgets(line, sizeof line, file)) {
        device_t *device = &devices[n];
        if (sscanf(line, "%d %95s %u %llu %u %u %d %31s %95[^\n]", &device->handle, device->uuid,
                   &device->minor, &device->memory, &device->mig, &device->events, &device->code,
                   device->bus_id, device->model) == 9)
            n++;
    }
    fclose(file);
    return n;
}

/* Handles are small numbers; none is the null pointer. */
static void *to_pointer(int handle) { return (void *)(long)(handle + 1); }

/* The number in a file, or another one if there is no such file. */
static unsigned long long number_in(const char *name, unsigned long long otherwise) {
    char path[4096];
    unsigned long long number = otherwise;
    in_own_folder(path, sizeof path, name);
    FILE *file = fopen(path, "r");
    if (!file) return otherwise;
    if (fscanf(file, "%llu", &number) != 1) number = otherwise;
    fclose(file);
    return number;
}

static void hang(void) {
    const struct timespec tick = {0, 1000000};
    char path[4096];
    in_own_folder(path, sizeof path, "hang");
    while (access(path, F_OK) == 0) nanosleep(&tick, NULL);
}

/* Finds a device by its handle and answers what every call about it answers. */
static int look_up(void *pointer, device_t *found) {
    if (n_inits == 0) return UNINITIALIZED;
    hang();
    int at, handle = (int)(long)pointer - 1;
    for (at = 0; at < n_listed && listed[at] != handle; at++) {
    }
    if (at == n_listed) return INVALID_ARGUMENT;
    device_t devices[MAX_DEVICES];
    int n = read_devices(devices);
    for (int i = 0; i < n; i++) {
        if (devices[i].handle != handle) continue;
        *found = devices[i];
        if (found->code == LOST) was_lost[at] = 1;
        return was_lost[at] ? LOST : found->code;
    }
    was_lost[at] = 1;
    return LOST;
}

static int copy_text(char *to, unsigned size, const char *from) {
    if (strlen(from) + 1 > size) return INSUFFICIENT_SIZE;
    strcpy(to, from);
    return SUCCESS;
}

int nvmlInit_v2(void) {
    char path[4096];
    int code = SUCCESS;
    in_own_folder(path, sizeof path, "init");
    FILE *file = fopen(path, "r");
    if (file) {
        if (fscanf(file, "%d", &code) != 1) code = SUCCESS;
        fclose(file);
    }
    record("init %d", code);
    if (code != SUCCESS || n_inits++ > 0) return code;
    device_t devices[MAX_DEVICES];
    n_listed = read_devices(devices);
    for (int i = 0; i < n_listed; i++) {
        listed[i] = devices[i].handle;
        strcpy(listed_uuid[i], devices[i].uuid);
        was_lost[i] = 0;
    }
    return SUCCESS;
}

int nvmlShutdown(void) {
    if (n_inits == 0) return UNINITIALIZED;
    n_inits--;
    record("shutdown");
    return SUCCESS;
}

int nvmlSystemGetDriverVersion(char *version, unsigned length) {
    return n_inits == 0 ? UNINITIALIZED : copy_text(version, length, "550.54.15");
}

int nvmlDeviceGetCount_v2(unsigned *count) {
    if (n_inits == 0) return UNINITIALIZED;
    *count = (unsigned)n_listed;
    return SUCCESS;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) {
    if (n_inits == 0) return UNINITIALIZED;
    if (index >= (unsigned)n_listed) return INVALID_ARGUMENT;
    device_t found;
    *device = to_pointer(listed[index]);
    return look_up(*device, &found);
}

int nvmlDeviceGetHandleByUUID(const char *uuid, void **device) {
    if (n_inits == 0) return UNINITIALIZED;
    for (int i = 0; i < n_listed; i++) {
        if (strcmp(listed_uuid[i], uuid) != 0) continue;
        device_t found;
        *device = to_pointer(listed[i]);
        return look_up(*device, &found);
    }
    return NOT_FOUND;
}

int nvmlDeviceGetUUID(void *device, char *uuid, unsigned length) {
    device_t found;
    int code = look_up(device, &found);
    return code ? code : copy_text(uuid, length, found.uuid);
}

int nvmlDeviceGetName(void *device, char *name, unsigned length) {
    device_t found;
    int code = look_up(device, &found);
    return code ? code : copy_text(name, length, found.model);
}

int nvmlDeviceGetMinorNumber(void *device, unsigned *minor) {
    device_t found;
    int code = look_up(device, &found);
    if (code) return code;
    if (found.minor == UNSUPPORTED_MINOR) return NOT_SUPPORTED;
    *minor = found.minor;
    return SUCCESS;
}

int nvmlDeviceGetMemoryInfo(void *device, memory_t *memory) {
    device_t found;
    int code = look_up(device, &found);
    if (code) return code;
    if (found.memory == UNSUPPORTED_MEMORY) return NOT_SUPPORTED;
    memory->total = memory->free = found.memory;
    memory->used = 0;
    return SUCCESS;
}

int nvmlDeviceGetMemoryInfo_v2(void *device, memory_v2_t *memory) {
    if (memory->version != (sizeof(memory_v2_t) | (2u << 24))) return VERSION_MISMATCH;
    device_t found;
    int code = look_up(device, &found);
    if (code) return code;
    if (found.memory == UNSUPPORTED_MEMORY) return NOT_SUPPORTED;
    memory->total = found.memory;
    memory->reserved = number_in("reserved", 0);
    memory->free = found.memory - memory->reserved;
    memory->used = 0;
    return SUCCESS;
}

/* What nvml.h calls nvmlFieldValue_t, with a value of eight bytes. */
typedef struct {
    unsigned field, scope;
    long long timestamp, latency;
    int value_type, code;
    unsigned long long value;
} field_value_t;

int nvmlDeviceGetFieldValues(void *device, int n, field_value_t *values) {
    char path[4096], line[256];
    device_t found;
    int code = look_up(device, &found), handle;
    unsigned field;
    unsigned long long value;
    if (code) return code;
    in_own_folder(path, sizeof path, "fields");
    for (int i = 0; i < n; i++) {
        values[i].code = NOT_SUPPORTED;
        values[i].value_type = 1; /* unsigned int */
        FILE *file = fopen(path, "r");
        if (!file) continue;
        while (fgets(line, sizeof line, file))
            if (sscanf(line, "%d %u %llu", &handle, &field, &value) == 3 && handle == found.handle && field == values[i].field) {
                values[i].code = SUCCESS;
                values[i].value = value;
            }
        fclose(file);
    }
    return SUCCESS;
}

int nvmlDeviceGetPciInfo_v3(void *device, pci_info_t *pci) {
    device_t found;
    int code = look_up(device, &found);
    if (code) return code;
    memset(pci, 0, sizeof *pci);
    return copy_text(pci->bus_id, sizeof pci->bus_id, found.bus_id);
}

/* Finds a link of a device; as with NVML, a number beyond the last is an invalid argument. */
static int look_up_link(void *pointer, unsigned link, unsigned *active, char *far_end) {
    char path[4096], line[256];
    device_t found;
    int code = look_up(pointer, &found), handle;
    unsigned number;
    if (code) return code;
    in_own_folder(path, sizeof path, "links");
    FILE *file = fopen(path, "r");
    if (!file) return NOT_SUPPORTED;
    code = INVALID_ARGUMENT;
    while (code && fgets(line, sizeof line, file))
        if (sscanf(line, "%d %u %u %31s", &handle, &number, active, far_end) == 4 && handle == found.handle && number == link)
            code = SUCCESS;
    fclose(file);
    return code;
}

int nvmlDeviceGetNvLinkState(void *device, unsigned link, unsigned *active) {
    char far_end[32];
    return look_up_link(device, link, active, far_end);
}

int nvmlDeviceGetNvLinkRemotePciInfo_v2(void *device, unsigned link, pci_info_t *pci) {
    char far_end[32];
    unsigned active;
    int code = look_up_link(device, link, &active, far_end);
    if (code) return code;
    memset(pci, 0, sizeof *pci);
    return copy_text(pci->bus_id, sizeof pci->bus_id, far_end);
}

int nvmlDeviceGetMigMode(void *device, unsigned *current, unsigned *pending) {
    device_t found;
    int code = look_up(device, &found);
    if (code) return code;
    *current = *pending = found.mig;
    return SUCCESS;
}

/* What NVIDIA's own container runtime asks as well. */
const char *nvmlErrorString(int code) {
    switch (code) {
        case SUCCESS: return "Success";
        case INVALID_ARGUMENT: return "Invalid Argument";
        case NOT_FOUND: return "Not Found";
        default: return "Unknown Error";
    }
}

int nvmlDeviceGetMaxMigDeviceCount(void *device, unsigned *count) {
    device_t found;
    int code = look_up(device, &found);
    if (code) return code;
    *count = 0;
    return SUCCESS;
}

int nvmlDeviceIsMigDeviceHandle(void *device, unsigned *is_mig) {
    device_t found;
    int code = look_up(device, &found);
    if (code) return code;
    *is_mig = 0;
    return SUCCESS;
}

int nvmlDeviceGetIndex(void *device, unsigned *index) {
    device_t found;
    int code = look_up(device, &found);
    if (code) return code;
    for (unsigned at = 0; at < (unsigned)n_listed; at++)
        if (listed[at] == found.handle) *index = at;
    return SUCCESS;
}

int nvmlDeviceGetSupportedEventTypes(void *device, unsigned long long *types) {
    device_t found;
    int code = look_up(device, &found);
    if (code) return code;
    *types = found.events ? XID_CRITICAL : 0;
    return SUCCESS;
}

int nvmlEventSetCreate(event_set_t **set) {
    *set = calloc(1, sizeof(event_set_t));
    record("set create");
    return SUCCESS;
}

int nvmlDeviceRegisterEvents(void *device, unsigned long long types, event_set_t *set) {
    device_t found;
    int code = look_up(device, &found);
    if (code) return code;
    record("register %s %llu", found.uuid, types);
    if (found.events != 1) return NOT_SUPPORTED;
    if (set->n_handles == MAX_DEVICES) return INVALID_ARGUMENT;
    set->handles[set->n_handles++] = found.handle;
    return SUCCESS;
}

/* The name of the first queued event, or an empty text. */
static void first_event(const char *folder, char *first, size_t size) {
    DIR *queue = opendir(folder);
    struct dirent *entry;
    first[0] = 0;
    if (!queue) return;
    while ((entry = readdir(queue)))
        if (entry->d_name[0] != '.' && (!first[0] || strcmp(entry->d_name, first) < 0))
            snprintf(first, size, "%s", entry->d_name);
    closedir(queue);
}

/* Takes the first queued event; 0 if there is none or nobody asked for it. */
static int take_event(const event_set_t *set, event_data_t *data) {
    char folder[4096], name[256], path[4400];
    int handle, is_asked;
    in_own_folder(folder, sizeof folder, "events-queue");
    first_event(folder, name, sizeof name);
    if (!name[0]) return 0;
    snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *file = fopen(path, "r");
    if (!file) return 0;
    memset(data, 0, sizeof *data);
    int n = fscanf(file, "%d %llu %llu", &handle, &data->type, &data->data);
    fclose(file);
    unlink(path);
    is_asked = handle < 0 || handle >= 100;
    for (int i = 0; i < set->n_handles; i++) is_asked |= set->handles[i] == handle;
    data->device = handle < 0 ? NULL : to_pointer(handle);
    record("event %d %llu %s", handle, data->data, is_asked ? "delivered" : "dropped");
    return n == 3 && is_asked;
}

int nvmlEventSetWait_v2(event_set_t *set, event_data_t *data, unsigned timeout_ms) {
    const struct timespec tick = {0, 1000000};
    int code = (int)number_in("wait", SUCCESS);
    if (code != SUCCESS) {
        record("wait %d", code);
        return code;
    }
    for (unsigned waited = 0; waited <= timeout_ms; waited++) {
        if (n_inits == 0) return UNINITIALIZED;
        if (take_event(set, data)) return SUCCESS;
        nanosleep(&tick, NULL);
    }
    return TIMEOUT;
}

int nvmlEventSetFree(event_set_t *set) {
    free(set);
    record("set free");
    return SUCCESS;
}

#ifndef WITHOUT_NEW_SYMBOLS
/* What nvml.h calls nvmlProcessInfo_t. */
typedef struct {
    unsigned pid;
    unsigned long long used;
    unsigned gpu_instance, compute_instance;
} process_t;

int nvmlDeviceGetComputeRunningProcesses_v3(void *device, unsigned *count, process_t *processes) {
    char path[4096], line[512];
    unsigned n = 0, room = *count;
    device_t found;
    int code = look_up(device, &found);
    if (code) return code;
    in_own_folder(path, sizeof path, "processes");
    FILE *file = fopen(path, "r");
    while (file && fgets(line, sizeof line, file)) {
        int handle;
        process_t process = {.gpu_instance = -1, .compute_instance = -1};
        if (sscanf(line, "%d %u %llu", &handle, &process.pid, &process.used) != 3 || handle != found.handle) continue;
        if (n < room && processes) processes[n] = process;
        n++;
    }
    if (file) fclose(file);
    *count = n;
    return n > room ? INSUFFICIENT_SIZE : SUCCESS;
}

/* The plugin must not call it: setting a limit needs privilege, and is what NVIDIA's hook does. */
int nvmlDeviceSetMemoryLimits_v1(void *device, void *limits) {
    (void)device, (void)limits;
    record("set memory limits");
    return NOT_SUPPORTED;
}

/* What nvml.h calls nvmlGetMemoryLimits_v1_t. */
typedef struct {
    const char *cgroup;
    unsigned long long soft, hard, used;
} memory_limits_t;

_Static_assert(sizeof(memory_limits_t) == 32 && offsetof(memory_limits_t, used) == 24, "the layout of nvml.h");

int nvmlDeviceGetMemoryLimits_v1(void *device, memory_limits_t *limits) {
    char path[4096], line[4600], cgroup[4096];
    device_t found;
    memory_limits_t read;
    int code = look_up(device, &found), handle;
    if (code) return code;
    /* NVML opens the directory. */
    if (found.mig || access(limits->cgroup, R_OK) != 0) return INVALID_ARGUMENT;
    in_own_folder(path, sizeof path, "memory-limits");
    FILE *file = fopen(path, "r");
    if (!file) return NOT_SUPPORTED;
    int answer = NOT_FOUND;
    while (answer == NOT_FOUND && fgets(line, sizeof line, file)) {
        int n = sscanf(line, "%d %4095s %llu %llu %llu %d", &handle, cgroup, &read.soft, &read.hard, &read.used, &code);
        if (n != 6 || handle != found.handle || strcmp(cgroup, limits->cgroup) != 0) continue;
        limits->soft = read.soft;
        limits->hard = read.hard;
        limits->used = read.used;
        answer = code;
    }
    fclose(file);
    return answer;
}
#endif
