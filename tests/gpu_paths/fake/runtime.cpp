// A CUDA runtime and driver on which every call succeeds and no kernel runs.
//
// Device memory is address space that nobody may touch: host code that follows a device pointer ends the process. It is
// counted, runs out at FAKE_GPU_GB, and holds nothing but small copies of the host's (boundaries, sizes, places), which
// come back as they went until another copy or a zeroing hits them: no kernel is seen. All else that is copied back is
// the same each time: a bool is true (a program asks whether all is finite), a number is 0, and in larger tensors each
// value is another one between 1 and 2, the same in fp32 and in bf16 but for what bf16 leaves out. Page-locked copies of
// more than 64 MB stay as they are.
#include "device.h"
#include <dlfcn.h>
#include <sys/mman.h>
#include <time.h>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <unistd.h>
#undef cudaGetDeviceProperties
#undef cudaStreamGetCaptureInfo

// ------------------------------------------------------------------------------------------------- settings
long setting(const char* name, long otherwise) {
  const char* text = getenv(name);
  return text ? atol(text) : otherwise;
}

void note(const char* call) {
  static const bool is_on = setting("FAKE_GPU_TRACE", 0);
  if (is_on) fprintf(stderr, "fake gpu: %s\n", call);
}

void* handle() { return calloc(1, 64); }

static thread_local int current_device = 0;
static thread_local cudaError_t last_error = cudaSuccess;
static cudaError_t failed(cudaError_t error) { return last_error = error; }
static int num_devices() { return (int)setting("FAKE_GPUS", 1); }

// A context holds half a gigabyte of its card: what opens one is written to FAKE_GPU_CONTEXTS, a folder, by process.
static std::atomic<bool> is_open[64];
static void open_context(int device, const char* call) {
  if (is_open[device].exchange(true)) return;
  static const char* folder = getenv("FAKE_GPU_CONTEXTS");
  if (!folder) return;
  FILE* file = fopen((std::string(folder) + "/" + std::to_string(getpid())).c_str(), "a");
  fprintf(file, "%d %s\n", device, call);
  fclose(file);
}
#define OPENS open_context(current_device, __func__);

// ------------------------------------------------------------------------------------------------- the ledger
// Ranges of addresses by their first one, and how much of the card is given away.
class Ledger {
 public:
  bool take(size_t bytes) {
    std::lock_guard<std::mutex> guard(mutex_);
    if (used_ + bytes > total()) return false;
    used_ += bytes;
    return true;
  }
  void give_back(size_t bytes) {
    std::lock_guard<std::mutex> guard(mutex_);
    used_ -= bytes;
  }
  void* open(size_t bytes, int access) {
    void* at = mmap(nullptr, bytes ? bytes : 1, access, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED) return nullptr;
    know(at, bytes);
    return at;
  }
  void know(const void* at, size_t bytes) {
    std::lock_guard<std::mutex> guard(mutex_);
    ranges_[(uintptr_t)at] = bytes;
  }
  size_t forget(const void* at) {  // its bytes
    std::lock_guard<std::mutex> guard(mutex_);
    auto found = ranges_.find((uintptr_t)at);
    if (found == ranges_.end()) return 0;
    size_t bytes = found->second;
    ranges_.erase(found);
    return bytes;
  }
  bool holds(const void* at) {
    std::lock_guard<std::mutex> guard(mutex_);
    auto next = ranges_.upper_bound((uintptr_t)at);
    if (next == ranges_.begin()) return false;
    --next;
    return (uintptr_t)at < next->first + next->second;
  }
  size_t used() { return used_; }
  static size_t total() {
    static const char* text = getenv("FAKE_GPU_GB");
    static const size_t bytes = text ? (size_t)(atof(text) * 1e9) : (size_t)(79.1 * (1ull << 30));
    return bytes;
  }

 private:
  std::mutex mutex_;
  std::map<uintptr_t, size_t> ranges_;
  size_t used_ = 0;
};
static Ledger& card = *new Ledger, &pinned = *new Ledger;  // never destroyed: other libraries free theirs at exit
bool is_device_memory(const void* at) { return card.holds(at); }

// ------------------------------------------------------------------------------------------------- devices
static int attribute(int which) {  // of an H100 SXM, those that torch, Triton and their kernels look at
  switch (which) {
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK: case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X: case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y: return 1024;
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z: return 64;
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X: return 2147483647;
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y: case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z: return 65535;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK: return 49152;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: return 232448;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR: return 233472;
    case CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK: return 1024;
    case CU_DEVICE_ATTRIBUTE_TOTAL_CONSTANT_MEMORY: return 65536;
    case CU_DEVICE_ATTRIBUTE_WARP_SIZE: return 32;
    case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK: case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR: return 65536;
    case CU_DEVICE_ATTRIBUTE_CLOCK_RATE: return 1980000;
    case CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE: return 2619000;
    case CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH: return 5120;
    case CU_DEVICE_ATTRIBUTE_TEXTURE_ALIGNMENT: return 512;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: return 132;
    case CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE: return 52428800;
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR: return 2048;
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR: return 32;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: return 9;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: return 0;
    case CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY: case CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS: case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING:
    case CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY: case CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH: case CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED: return 1;
    default: return 0;
  }
}

API cudaError_t cudaGetDeviceCount(int* count) { *count = num_devices(); return cudaSuccess; }
API CUresult cuDeviceGetCount(int* count) { *count = num_devices(); return CUDA_SUCCESS; }
API cudaError_t cudaGetDevice(int* device) { *device = current_device; return cudaSuccess; }
API cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= num_devices()) return failed(cudaErrorInvalidDevice);
  current_device = device;
  OPENS
  return cudaSuccess;
}
API CUresult cuDeviceGet(CUdevice* device, int number) { *device = number; return CUDA_SUCCESS; }
API cudaError_t cudaDriverGetVersion(int* version) { *version = CUDART_VERSION; return cudaSuccess; }
API cudaError_t cudaRuntimeGetVersion(int* version) { *version = CUDART_VERSION; return cudaSuccess; }
API CUresult cuDriverGetVersion(int* version) { *version = CUDART_VERSION; return CUDA_SUCCESS; }
API cudaError_t cudaGetLastError() { cudaError_t error = last_error; last_error = cudaSuccess; return error; }
API cudaError_t cudaPeekAtLastError() { return last_error; }
API const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaErrorMemoryAllocation ? "out of memory" : error == cudaErrorInvalidConfiguration ? "invalid configuration argument" : "an error of the fake GPU";
}
API const char* cudaGetErrorName(cudaError_t) { return "cudaErrorOfTheFakeGpu"; }
API CUresult cuGetErrorString(CUresult, const char** text) { *text = "an error of the fake driver"; return CUDA_SUCCESS; }
API CUresult cuGetErrorName(CUresult, const char** text) { *text = "CUDA_ERROR_OF_THE_FAKE_GPU"; return CUDA_SUCCESS; }
API cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr which, int) { *value = attribute((int)which); return cudaSuccess; }
API CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute which, CUdevice) { *value = attribute((int)which); return CUDA_SUCCESS; }
API cudaError_t cudaGetDeviceProperties(cudaDeviceProp* of, int) {
  memset(of, 0, sizeof *of);
  const char* name = getenv("FAKE_GPU_NAME");
  snprintf(of->name, sizeof of->name, "%s", name ? name : "NVIDIA H100 80GB HBM3");
  of->totalGlobalMem = Ledger::total();
  of->major = 9;
  of->multiProcessorCount = attribute(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
  of->warpSize = 32;
  of->sharedMemPerBlock = attribute(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK);
  of->sharedMemPerBlockOptin = attribute(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN);
  of->sharedMemPerMultiprocessor = attribute(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR);
  of->reservedSharedMemPerBlock = 1024;
  of->regsPerBlock = of->regsPerMultiprocessor = 65536;
  of->maxThreadsPerBlock = of->maxThreadsDim[0] = of->maxThreadsDim[1] = 1024;
  of->maxThreadsDim[2] = 64;
  of->maxGridSize[0] = 2147483647;
  of->maxGridSize[1] = of->maxGridSize[2] = 65535;
  of->maxThreadsPerMultiProcessor = 2048;
  of->maxBlocksPerMultiProcessor = 32;
  of->totalConstMem = 65536;
  of->textureAlignment = 512;
  of->memoryBusWidth = 5120;
  of->l2CacheSize = 52428800;
  of->persistingL2CacheMaxSize = 33554432;
  of->canMapHostMemory = of->concurrentKernels = of->unifiedAddressing = of->managedMemory = of->cooperativeLaunch = of->memoryPoolsSupported = 1;
  of->asyncEngineCount = 3;
  return cudaSuccess;
}
API cudaError_t cudaDeviceGetPCIBusId(char* text, int size, int device) { snprintf(text, size, "0000:%02x:00.0", device + 1); return cudaSuccess; }
API cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) { *least = 0; *greatest = -5; return cudaSuccess; }
API cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) { *can = 1; return cudaSuccess; }
static const CUcontext context = (CUcontext)0x10;
API CUresult cuCtxGetCurrent(CUcontext* current) { *current = context; return CUDA_SUCCESS; }
API CUresult cuCtxGetDevice(CUdevice* device) { *device = current_device; return CUDA_SUCCESS; }
API CUresult cuDevicePrimaryCtxRetain(CUcontext* made, CUdevice device) { open_context(device, __func__); *made = context; return CUDA_SUCCESS; }
API CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned* flags, int* is_active) { *flags = 0; *is_active = is_open[device]; return CUDA_SUCCESS; }

// ------------------------------------------------------------------------------------------------- memory
API cudaError_t cudaMalloc(void** at, size_t bytes) {
  OPENS
  *at = card.take(bytes) ? card.open(bytes, PROT_NONE) : nullptr;
  return *at ? cudaSuccess : failed(cudaErrorMemoryAllocation);
}
API cudaError_t cudaMallocAsync(void** at, size_t bytes, cudaStream_t) { return cudaMalloc(at, bytes); }
API cudaError_t cudaFree(void* at) {
  size_t bytes = card.forget(at);
  card.give_back(bytes);
  if (bytes) munmap(at, bytes);
  return cudaSuccess;
}
API cudaError_t cudaFreeAsync(void* at, cudaStream_t) { return cudaFree(at); }
API cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* total_bytes) {
  OPENS
  *total_bytes = Ledger::total();
  *free_bytes = *total_bytes - card.used();
  return cudaSuccess;
}
API cudaError_t cudaHostAlloc(void** at, size_t bytes, unsigned) {
  OPENS
  *at = pinned.open(bytes, PROT_READ | PROT_WRITE);
  return *at ? cudaSuccess : failed(cudaErrorMemoryAllocation);
}
API cudaError_t cudaMallocHost(void** at, size_t bytes) { return cudaHostAlloc(at, bytes, 0); }
API cudaError_t cudaFreeHost(void* at) {
  size_t bytes = pinned.forget(at);
  munmap(at, bytes ? bytes : 1);
  return cudaSuccess;
}
API cudaError_t cudaHostRegister(void* at, size_t bytes, unsigned) { OPENS pinned.know(at, bytes); return cudaSuccess; }
API cudaError_t cudaHostUnregister(void* at) { pinned.forget(at); return cudaSuccess; }
API cudaError_t cudaHostGetDevicePointer(void** there, void* at, unsigned) { *there = at; return cudaSuccess; }
API cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* of, const void* at) {
  memset(of, 0, sizeof *of);
  of->type = card.holds(at) ? cudaMemoryTypeDevice : pinned.holds(at) ? cudaMemoryTypeHost : cudaMemoryTypeUnregistered;
  of->device = current_device;
  of->devicePointer = of->hostPointer = (void*)at;
  return cudaSuccess;
}
API CUresult cuPointerGetAttribute(void* out, CUpointer_attribute which, CUdeviceptr at) {
  if (which == CU_POINTER_ATTRIBUTE_DEVICE_POINTER) *(CUdeviceptr*)out = at;
  else if (which == CU_POINTER_ATTRIBUTE_CONTEXT) *(CUcontext*)out = context;
  else *(unsigned*)out = 0;
  return CUDA_SUCCESS;
}
// Small copies that lie on the card, by their first address.
class Kept {
 public:
  void put(const void* to, const void* from, size_t bytes) {
    std::lock_guard<std::mutex> guard(mutex_);
    forget((uintptr_t)to, bytes);
    if (from && bytes > 8 && bytes <= MOST) copies_[(uintptr_t)to] = std::string((const char*)from, bytes);
  }
  bool get(void* to, const void* from, size_t bytes) {
    std::lock_guard<std::mutex> guard(mutex_);
    auto next = copies_.upper_bound((uintptr_t)from);
    if (next == copies_.begin()) return false;
    --next;
    size_t offset = (uintptr_t)from - next->first;
    if (offset + bytes > next->second.size()) return false;
    memcpy(to, next->second.data() + offset, bytes);
    return true;
  }
  void move(const void* to, const void* from, size_t bytes) {  // on the card
    std::string held(bytes <= MOST ? bytes : 0, 0);
    put(to, bytes <= MOST && get(&held[0], from, bytes) ? held.data() : nullptr, bytes);
  }

 private:
  void forget(uintptr_t at, size_t bytes) {
    auto next = copies_.lower_bound(at);
    if (next != copies_.begin() && std::prev(next)->first + std::prev(next)->second.size() > at) --next;
    while (next != copies_.end() && next->first < at + bytes) next = copies_.erase(next);
  }
  static constexpr size_t MOST = 1 << 20;
  std::mutex mutex_;
  std::map<uintptr_t, std::string> copies_;
};
static Kept& kept = *new Kept;
static void copy(void* to, const void* from, size_t bytes) {
  if (card.holds(to)) {
    if (card.holds(from)) kept.move(to, from, bytes);
    else kept.put(to, from, bytes);
    return;
  }
  if (!card.holds(from)) memmove(to, from, bytes);
  else if (bytes == 1) *(unsigned char*)to = 1;
  else if (bytes <= 8) memset(to, 0, bytes);
  // Page-locked memory stays address space: inductor, which measures its choices, saves what a kernel overwrites there,
  // matrices of gigabytes.
  else if (bytes > (64 << 20) && pinned.holds(to)) return;
  else if (!kept.get(to, from, bytes)) {
    uint16_t* halves = (uint16_t*)to;
    memset(to, 0, bytes);
    for (size_t i = 0; i < bytes / 2; i++) {
      size_t number = i;
      while (number & 1) number >>= 1;  // the upper half of the fp32 value k is the bf16 value k
      halves[i] = 0x3F80 | ((uint32_t)number * 2654435761u >> 25);
    }
  }
}
API cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) { OPENS note("cudaMemcpy"); copy(to, from, bytes); return cudaSuccess; }
API cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t) { OPENS copy(to, from, bytes); return cudaSuccess; }
API cudaError_t cudaMemcpyPeerAsync(void*, int, const void*, int, size_t, cudaStream_t) { return cudaSuccess; }
API cudaError_t cudaMemset(void* at, int, size_t bytes) { kept.put(at, nullptr, bytes); return cudaSuccess; }
API cudaError_t cudaMemsetAsync(void* at, int, size_t bytes, cudaStream_t) { kept.put(at, nullptr, bytes); return cudaSuccess; }
API CUresult cuMemcpyDtoH_v2(void* to, CUdeviceptr from, size_t bytes) { copy(to, (void*)from, bytes); return CUDA_SUCCESS; }
// expandable segments: addresses are reserved first and memory is put there later
API CUresult cuMemGetAllocationGranularity(size_t* bytes, const CUmemAllocationProp*, CUmemAllocationGranularity_flags) { *bytes = 2 << 20; return CUDA_SUCCESS; }
API CUresult cuMemAddressReserve(CUdeviceptr* at, size_t bytes, size_t, CUdeviceptr, unsigned long long) {
  *at = (CUdeviceptr)card.open(bytes, PROT_NONE);
  return *at ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}
API CUresult cuMemAddressFree(CUdeviceptr at, size_t bytes) { card.forget((void*)at); munmap((void*)at, bytes); return CUDA_SUCCESS; }
API CUresult cuMemCreate(CUmemGenericAllocationHandle* made, size_t bytes, const CUmemAllocationProp*, unsigned long long) {
  OPENS
  if (!card.take(bytes)) return CUDA_ERROR_OUT_OF_MEMORY;
  *made = bytes;  // a handle is its size: nothing else is ever asked of it
  return CUDA_SUCCESS;
}
API CUresult cuMemRelease(CUmemGenericAllocationHandle made) { card.give_back(made); return CUDA_SUCCESS; }

// ------------------------------------------------------------------------------------------------- streams, events
static double seconds() { timespec t; clock_gettime(CLOCK_MONOTONIC, &t); return t.tv_sec + 1e-9 * t.tv_nsec; }
API cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) { OPENS *stream = (cudaStream_t)handle(); return cudaSuccess; }
API cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) { OPENS *stream = (cudaStream_t)handle(); return cudaSuccess; }
API cudaError_t cudaStreamCreate(cudaStream_t* stream) { OPENS *stream = (cudaStream_t)handle(); return cudaSuccess; }
API cudaError_t cudaStreamGetPriority(cudaStream_t, int* priority) { *priority = 0; return cudaSuccess; }
API cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) { OPENS *status = cudaStreamCaptureStatusNone; return cudaSuccess; }
API cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus* status, unsigned long long* id, cudaGraph_t*, const cudaGraphNode_t**, const cudaGraphEdgeData**, size_t*) {
  OPENS
  *status = cudaStreamCaptureStatusNone;
  if (id) *id = 0;
  return cudaSuccess;
}
API cudaError_t cudaStreamGetCaptureInfo_v2(cudaStream_t stream, cudaStreamCaptureStatus* status, unsigned long long* id, cudaGraph_t*, const cudaGraphNode_t**, size_t*) {
  return cudaStreamGetCaptureInfo(stream, status, id, nullptr, nullptr, nullptr, nullptr);
}
API cudaError_t cudaStreamSynchronize(cudaStream_t) { OPENS note("cudaStreamSynchronize"); return cudaSuccess; }
API cudaError_t cudaDeviceSynchronize() { OPENS note("cudaDeviceSynchronize"); return cudaSuccess; }
API cudaError_t cudaLaunchHostFunc(cudaStream_t, cudaHostFn_t function, void* data) { function(data); return cudaSuccess; }
API cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t function, void* data, unsigned) { function(stream, cudaSuccess, data); return cudaSuccess; }
API cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) { OPENS *event = (cudaEvent_t)handle(); return cudaSuccess; }
API cudaError_t cudaEventCreate(cudaEvent_t* event) { OPENS *event = (cudaEvent_t)handle(); return cudaSuccess; }
API cudaError_t cudaEventDestroy(cudaEvent_t event) { free(event); return cudaSuccess; }
API cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t) { OPENS *(double*)event = seconds(); return cudaSuccess; }
API cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t, unsigned) { OPENS *(double*)event = seconds(); return cudaSuccess; }
API cudaError_t cudaEventSynchronize(cudaEvent_t) { note("cudaEventSynchronize"); return cudaSuccess; }
API cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t from, cudaEvent_t to) { *ms = 1e3f * (float)(*(double*)to - *(double*)from); return cudaSuccess; }

// ------------------------------------------------------------------------------------------------- kernels
// A launch that an H100 would refuse is refused, and said on stderr.
static bool fits(dim3 grid, dim3 block, size_t shared_bytes) {
  bool is_empty = !grid.x || !grid.y || !grid.z || !block.x || !block.y || !block.z;
  bool is_too_large = grid.y > 65535 || grid.z > 65535 || block.z > 64 || (size_t)block.x * block.y * block.z > 1024 || shared_bytes > 232448;
  if (!is_empty && !is_too_large) return true;
  fprintf(stderr, "fake gpu: no H100 launches a grid of %u x %u x %u, blocks of %u x %u x %u, %zu bytes of shared memory\n", grid.x, grid.y, grid.z, block.x, block.y, block.z, shared_bytes);
  return false;
}
static cudaError_t launch(dim3 grid, dim3 block, size_t shared_bytes) { return fits(grid, block, shared_bytes) ? cudaSuccess : failed(cudaErrorInvalidConfiguration); }
static CUresult driver_launch(dim3 grid, dim3 block, size_t shared_bytes) { return fits(grid, block, shared_bytes) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE; }
static thread_local struct { dim3 grid, block; size_t shared_bytes; cudaStream_t stream; } pushed;
API void** __cudaRegisterFatBinary(void*) { return (void**)handle(); }
API void __cudaRegisterFatBinaryEnd(void**) {}
API void __cudaUnregisterFatBinary(void**) {}
API void __cudaRegisterFunction(void**, const char*, char*, const char*, int, uint3*, uint3*, dim3*, dim3*, int*) {}
API void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
API char __cudaInitModule(void**) { return 1; }
API unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t stream) { pushed = {grid, block, shared_bytes, stream}; return 0; }
API cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared_bytes, void* stream) {
  *grid = pushed.grid;
  *block = pushed.block;
  *shared_bytes = pushed.shared_bytes;
  *(cudaStream_t*)stream = pushed.stream;
  return cudaSuccess;
}
API cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) { *kernel = (cudaKernel_t)function; return cudaSuccess; }
API cudaError_t __cudaLaunchKernel(cudaKernel_t, dim3 grid, dim3 block, void**, size_t shared_bytes, cudaStream_t) { OPENS return launch(grid, block, shared_bytes); }
API cudaError_t cudaLaunchKernel(const void*, dim3 grid, dim3 block, void**, size_t shared_bytes, cudaStream_t) { OPENS return launch(grid, block, shared_bytes); }
API cudaError_t cudaLaunchCooperativeKernel(const void*, dim3 grid, dim3 block, void**, size_t shared_bytes, cudaStream_t) { return launch(grid, block, shared_bytes); }
API cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* how, const void*, void**) { OPENS return launch(how->gridDim, how->blockDim, how->dynamicSmemBytes); }
API CUresult cuLaunchKernel(CUfunction, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared_bytes, CUstream, void**, void**) { return driver_launch(dim3(gx, gy, gz), dim3(bx, by, bz), shared_bytes); }
API CUresult cuLaunchKernelEx(const CUlaunchConfig* how, CUfunction, void**, void**) {
  return driver_launch(dim3(how->gridDimX, how->gridDimY, how->gridDimZ), dim3(how->blockDimX, how->blockDimY, how->blockDimZ), how->sharedMemBytes);
}
API cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* of, const void*) {
  memset(of, 0, sizeof *of);
  of->maxThreadsPerBlock = 1024;
  of->numRegs = 64;
  of->ptxVersion = of->binaryVersion = 90;
  of->maxDynamicSharedSizeBytes = 232448;
  return cudaSuccess;
}
API CUresult cuFuncGetAttribute(int* value, CUfunction_attribute which, CUfunction) {
  *value = which == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : which == CU_FUNC_ATTRIBUTE_NUM_REGS ? 64 : 0;
  return CUDA_SUCCESS;
}
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*, int, size_t) { *blocks = 2; return cudaSuccess; }
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*, int, size_t, unsigned) { *blocks = 2; return cudaSuccess; }
API CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, CUfunction, int, size_t) { *blocks = 2; return CUDA_SUCCESS; }
API CUresult cuOccupancyMaxActiveClusters(int* clusters, CUfunction, const CUlaunchConfig*) { *clusters = 16; return CUDA_SUCCESS; }
API cudaError_t cudaGetSymbolAddress(void** at, const void*) { static void* room = calloc(1, 1 << 16); *at = room; return cudaSuccess; }
API CUresult cuModuleLoadData(CUmodule* made, const void*) { *made = (CUmodule)handle(); return CUDA_SUCCESS; }
API CUresult cuModuleLoadDataEx(CUmodule* made, const void*, unsigned, CUjit_option*, void**) { *made = (CUmodule)handle(); return CUDA_SUCCESS; }
API CUresult cuModuleLoad(CUmodule* made, const char*) { *made = (CUmodule)handle(); return CUDA_SUCCESS; }
API CUresult cuModuleGetFunction(CUfunction* made, CUmodule, const char*) { *made = (CUfunction)handle(); return CUDA_SUCCESS; }
API CUresult cuLibraryLoadData(CUlibrary* made, const void*, CUjit_option*, void**, unsigned, CUlibraryOption*, void**, unsigned) { *made = (CUlibrary)handle(); return CUDA_SUCCESS; }
API CUresult cuLibraryGetKernel(CUkernel* made, CUlibrary, const char*) { *made = (CUkernel)handle(); return CUDA_SUCCESS; }
API CUresult cuKernelGetFunction(CUfunction* made, CUkernel) { *made = (CUfunction)handle(); return CUDA_SUCCESS; }

// Functions that are asked for by name; those that nobody wrote do nothing and succeed.
static long nothing() { return 0; }
static void* by_name(const char* name) { void* found = dlsym(RTLD_DEFAULT, name); return found ? found : (void*)nothing; }
API cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned, unsigned long long, cudaDriverEntryPointQueryResult* result) {
  *function = by_name(name);
  if (result) *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
API CUresult cuGetProcAddress_v2(const char* name, void** function, int, cuuint64_t, CUdriverProcAddressQueryResult* result) {
  *function = by_name(name);
  if (result) *result = CU_GET_PROC_ADDRESS_SUCCESS;
  return CUDA_SUCCESS;
}
