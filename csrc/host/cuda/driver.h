#pragma once
// The few functions of the CUDA driver that copies and flags need, loaded at run time: no CUDA header, no link.
#include "host/error.h"

namespace mk::host::cuda {

using Result = int;  ///< CUresult
inline constexpr Result kSuccess = 0;
inline constexpr Result kNotReady = 600;

/// CUstreamBatchMemOpParams as far as a 32-bit write and a flush need it; the driver's union has 48 bytes.
struct WriteOperation {
  u32 operation = 2;  ///< CU_STREAM_MEM_OP_WRITE_VALUE_32; kFlushRemoteWrites takes no address
  u32 padding = 0;
  u64 address = 0;
  u64 value = 0;
  u32 flags = 0;      ///< CU_STREAM_WRITE_VALUE_DEFAULT: a fence before the write
  u32 reserved = 0;
  u64 alias = 0;
  u64 rest = 0;
};
static_assert(sizeof(WriteOperation) == 48, "size of CUstreamBatchMemOpParams");
inline constexpr u32 kFlushRemoteWrites = 3;  ///< CU_STREAM_MEM_OP_FLUSH_REMOTE_WRITES

/// Names and types are the driver's; tests put functions of their own here.
struct Driver {
  Result (*init)(unsigned flags);                                          ///< cuInit
  Result (*retain)(void** context, int device);                            ///< cuDevicePrimaryCtxRetain
  Result (*release)(int device);                                           ///< cuDevicePrimaryCtxRelease_v2
  Result (*set_current)(void* context);                                    ///< cuCtxSetCurrent
  Result (*push)(void* context);                                           ///< cuCtxPushCurrent_v2
  Result (*pop)(void** context);                                           ///< cuCtxPopCurrent_v2
  Result (*create_stream)(void** stream, unsigned flags, int priority);    ///< cuStreamCreateWithPriority
  Result (*destroy_stream)(void* stream);                                  ///< cuStreamDestroy_v2
  Result (*create_event)(void** event, unsigned flags);                    ///< cuEventCreate
  Result (*destroy_event)(void* event);                                    ///< cuEventDestroy_v2
  Result (*record)(void* event, void* stream);                             ///< cuEventRecord
  Result (*query)(void* event);                                            ///< cuEventQuery
  Result (*copy)(u64 destination, u64 source, std::size_t bytes, void* stream);  ///< cuMemcpyAsync
  Result (*batch)(void* stream, unsigned count, WriteOperation* operations, unsigned flags);  ///< cuStreamBatchMemOp_v2
  Result (*flush)(int target, int scope);                                  ///< cuFlushGPUDirectRDMAWrites
  Result (*attribute)(int* value, int attribute, int device);              ///< cuDeviceGetAttribute
  Result (*pin)(void* address, std::size_t bytes, unsigned flags);         ///< cuMemHostRegister_v2
  Result (*unpin)(void* address);                                          ///< cuMemHostUnregister
  Result (*range)(u64* base, std::size_t* bytes, u64 address);             ///< cuMemGetAddressRange_v2
  /// cuMemGetHandleForAddressRange, from CUDA 11.7 on; null before.
  Result (*handle)(void* handle, u64 address, std::size_t bytes, int type, unsigned long long flags);
};

/// All of them from libcuda.so.1, and cuInit called.
Error load_driver(Driver& driver);

}  // namespace mk::host::cuda
