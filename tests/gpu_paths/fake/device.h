// What the two halves of the fake GPU share: counts of calls, the ledger of device memory, and the settings of the
// environment. See __init__.py of this folder.
#pragma once
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <cstdint>
#include <cstdlib>
#define API extern "C" __attribute__((visibility("default")))

long setting(const char* name, long otherwise);
void note(const char* call);             // FAKE_GPU_TRACE=1: a line of stderr for each call that waits
void* handle();                          // a new object that nobody looks into
bool is_device_memory(const void* at);
