// The compiler of torch's own few kernels that are made when they are first called: here they need no code. Under the
// name of the real one, which is asked for its functions by torch itself.
#include <cstdlib>
#include <cuda_runtime_api.h>
#define API extern "C" __attribute__((visibility("default")))

API int nvrtcCreateProgram(void** made, ...) { *made = calloc(1, 64); return 0; }
API int nvrtcGetPTXSize(void*, size_t* bytes) { *bytes = 8; return 0; }
API int nvrtcGetCUBINSize(void*, size_t* bytes) { *bytes = 8; return 0; }
API int nvrtcGetProgramLogSize(void*, size_t* bytes) { *bytes = 1; return 0; }
API int nvrtcGetLoweredName(void*, const char*, const char** name) { *name = "kernel"; return 0; }
API int nvrtcGetNumSupportedArchs(int* count) { *count = 1; return 0; }
API int nvrtcGetSupportedArchs(int* archs) { *archs = 90; return 0; }
API int nvrtcVersion(int* major, int* minor) { *major = CUDART_VERSION / 1000; *minor = CUDART_VERSION % 1000 / 10; return 0; }
API const char* nvrtcGetErrorString(int) { return "an error of the fake NVRTC"; }
API int nvrtcAddNameExpression(void*, const char*) { return 0; }
API int nvrtcCompileProgram(void*, int, const char* const*) { return 0; }
API int nvrtcDestroyProgram(void**) { return 0; }
API int nvrtcGetCUBIN(void*, char*) { return 0; }
API int nvrtcGetPTX(void*, char*) { return 0; }
API int nvrtcGetProgramLog(void*, char* text) { *text = 0; return 0; }
