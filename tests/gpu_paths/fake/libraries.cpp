// cuBLAS, cuDNN, CUPTI and NCCL that compute and send nothing.
//
// FAKE_NCCL_LOG=FOLDER: each process writes a line for each call of a collective, `communicator rank size call count
// type`, so that a test can compare what the ranks of a communicator do, in which order: what differs would hang.
#include "device.h"
#include <unistd.h>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <map>
#include <mutex>
#include <string>

#define MAKES(name) API int name(void** made, ...) { *made = handle(); return 0; }
MAKES(cublasCreate_v2) MAKES(cublasLtCreate) MAKES(cudnnCreate) MAKES(cusolverDnCreate) MAKES(cusparseCreate)
API size_t cublasLtGetVersion() { return 130100; }
API int cublasLtMatmulAlgoGetHeuristic(void*, void*, void*, void*, void*, void*, void*, int, void*, int* found) { *found = 1; return 0; }
static const int CUDNN[] = {9, 99, 0};  // torch refuses one older than it was built with
API size_t cudnnGetVersion() { return 10000 * CUDNN[0] + 100 * CUDNN[1] + CUDNN[2]; }
API int cudnnGetProperty(int which, int* value) { *value = CUDNN[which]; return 0; }  // major, minor, patch level
API size_t cudnnGetCudartVersion() { return 13000; }
API const char* cudnnGetErrorString(int) { return "an error of the fake cuDNN"; }

// the profiler's library: no kernel is ever seen
API int cuptiGetVersion(unsigned* version) { *version = 130000; return 0; }
API int cuptiGetResultString(int, const char** text) { *text = "an error of the fake CUPTI"; return 0; }
API int cuptiGetCallbackName(int, unsigned, const char** name) { *name = "call"; return 0; }
API int cuptiActivityGetNextRecord(unsigned char*, size_t, void**) { return 12; }  // there are no more
API int cuptiActivityGetNumDroppedRecords(void*, unsigned, size_t* dropped) { *dropped = 0; return 0; }

// ------------------------------------------------------------------------------------------------- NCCL
struct Communicator { std::string name; int size, rank; std::map<int, int> splits; };
struct Id { char bytes[128]; };
enum Type { int8, uint8, int32, uint32, int64, uint64, half_, single, double_, bfloat16 };
static std::mutex mutex;

static void record(void* of, const char* call, size_t count, int type) {
  static const char* folder = getenv("FAKE_NCCL_LOG");
  if (!folder) return;
  std::lock_guard<std::mutex> guard(mutex);
  static FILE* file = fopen((std::string(folder) + "/" + std::to_string(getpid())).c_str(), "a");
  auto* communicator = (Communicator*)of;
  if (!file) return;
  fprintf(file, "%s %d %d %s %zu %d\n", communicator->name.c_str(), communicator->rank, communicator->size, call, count, type);
  fflush(file);
}
static int open(void** made, const std::string& name, int size, int rank) {
  auto* communicator = new Communicator{name, size, rank, {}};
  *made = communicator;
  record(communicator, "open", 0, 0);
  return 0;
}
static std::string name_of(const Id& id) {
  char text[17];
  uint64_t number;
  memcpy(&number, id.bytes, 8);
  snprintf(text, sizeof text, "%016llx", (unsigned long long)number);
  return text;
}
API int ncclGetVersion(int* version) { *version = 22809; return 0; }
API const char* ncclGetErrorString(int) { return "an error of the fake NCCL"; }
API const char* ncclGetLastError(void*) { return ""; }
API int ncclGetUniqueId(Id* id) {
  static uint64_t number = ((uint64_t)getpid() << 32) + time(nullptr);
  memset(id, 7, sizeof *id);
  std::lock_guard<std::mutex> guard(mutex);
  number++;
  memcpy(id->bytes, &number, 8);
  return 0;
}
API int ncclCommInitRank(void** made, int size, Id id, int rank) { return open(made, name_of(id), size, rank); }
API int ncclCommInitRankConfig(void** made, int size, Id id, int rank, void*) { return open(made, name_of(id), size, rank); }
API int ncclCommInitRankScalable(void** made, int size, int rank, int, Id* ids, void*) { return open(made, name_of(ids[0]), size, rank); }
// How many ranks of the parent give this color: each leaves a file with its own, and reads those of all. -1 after a minute.
static int members(const Communicator* parent, int number, int color) {
  const char* logs = getenv("FAKE_NCCL_LOG");
  std::string start = std::string(logs ? logs : "/tmp") + "/split." + parent->name + "." + std::to_string(number) + ".";
  std::string own = start + std::to_string(parent->rank);
  FILE* made = fopen((own + ".new").c_str(), "w");
  if (!made) return -1;
  fprintf(made, "%d", color);
  fclose(made);
  if (rename((own + ".new").c_str(), own.c_str())) return -1;
  int found = 0;
  for (int rank = 0, waited = 0; rank < parent->size; waited++) {
    FILE* file = fopen((start + std::to_string(rank)).c_str(), "r");
    if (!file) {
      if (waited > 60000) return -1;
      usleep(1000);
      continue;
    }
    int other;
    if (fscanf(file, "%d", &other) == 1) found += other == color;
    fclose(file);
    rank++;
  }
  return found;
}
API int ncclCommSplit(void* of, int color, int key, void** made, void*) {
  auto* parent = (Communicator*)of;
  int number;
  { std::lock_guard<std::mutex> guard(mutex); number = parent->splits[0]++; }
  *made = nullptr;
  int size = parent->size == 1 ? 1 : members(parent, number, color);
  if (size < 0) return 2;  // ncclSystemError: a rank of the parent does not take part
  if (color < 0) return 0;
  return open(made, parent->name + "." + std::to_string(number) + "." + std::to_string(color), size, key);
}
API int ncclCommGetAsyncError(void*, int* error) { *error = 0; return 0; }
API int ncclCommCount(void* of, int* size) { *size = ((Communicator*)of)->size; return 0; }
API int ncclCommUserRank(void* of, int* rank) { *rank = ((Communicator*)of)->rank; return 0; }
API int ncclAllReduce(const void*, void*, size_t count, int type, int, void* of, void*) { record(of, "all_reduce", count, type); return 0; }
API int ncclAllGather(const void*, void*, size_t count, int type, void* of, void*) { record(of, "all_gather", count, type); return 0; }
API int ncclReduceScatter(const void*, void*, size_t count, int type, int, void* of, void*) { record(of, "reduce_scatter", count, type); return 0; }
API int ncclBroadcast(const void*, void*, size_t count, int type, int, void* of, void*) { record(of, "broadcast", count, type); return 0; }
API int ncclReduce(const void*, void*, size_t count, int type, int, int, void* of, void*) { record(of, "reduce", count, type); return 0; }
API int ncclAlltoAll(const void*, void*, size_t count, int type, void* of, void*) { record(of, "all_to_all", count, type); return 0; }
API int ncclSend(const void*, size_t count, int type, int peer, void* of, void*) { record(of, ("send_to_" + std::to_string(peer)).c_str(), count, type); return 0; }
API int ncclRecv(void*, size_t count, int type, int peer, void* of, void*) { record(of, ("receive_from_" + std::to_string(peer)).c_str(), count, type); return 0; }
