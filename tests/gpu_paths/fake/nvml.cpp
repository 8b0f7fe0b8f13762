// The management library: one card without links, no process on it, and clocks as high as they get.
#include <cstdio>
#include <cstring>
#define API extern "C" __attribute__((visibility("default")))
static const int NOT_SUPPORTED = 3;

API int nvmlInit_v2() { return 0; }
API int nvmlShutdown() { return 0; }
API int nvmlDeviceGetCount_v2(unsigned* count) { *count = 1; return 0; }
API int nvmlDeviceGetHandleByPciBusId_v2(const char*, void** device) { *device = (void*)0x20; return 0; }
API int nvmlDeviceGetHandleByIndex_v2(unsigned, void** device) { *device = (void*)0x20; return 0; }
API int nvmlDeviceGetNvLinkRemoteDeviceType(void*, unsigned, int*) { return NOT_SUPPORTED; }
API int nvmlDeviceGetNvLinkRemotePciInfo_v2(void*, unsigned, void*) { return NOT_SUPPORTED; }
API int nvmlDeviceGetComputeRunningProcesses(void*, unsigned* count, void*) { *count = 0; return 0; }
API int nvmlDeviceGetComputeRunningProcesses_v3(void*, unsigned* count, void*) { *count = 0; return 0; }
API int nvmlSystemGetCudaDriverVersion_v2(int* version) { *version = 13000; return 0; }
API int nvmlDeviceGetGpuFabricInfoV(void*, void*) { return 0; }  // of no fabric, as it came
API int nvmlDeviceGetGpuFabricInfo(void*, void*) { return NOT_SUPPORTED; }
API const char* nvmlErrorString(int) { return "an error of the fake management library"; }
