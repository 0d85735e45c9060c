#include "calls.h"

#include <dlfcn.h>
#include <pthread.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>

namespace mk::test {

namespace {

std::atomic<bool> makes_proxies{false}, counts{false};
std::array<std::atomic<u64>, kKinds> counters;
std::atomic<const void*> first{nullptr};
thread_local bool is_proxy = false;

bool is_network(const void* caller) noexcept {
  Dl_info info;
  if (dladdr(caller, &info) == 0 || info.dli_fname == nullptr) return false;
  return std::strstr(info.dli_fname, "libibverbs") != nullptr || std::strstr(info.dli_fname, "libefa") != nullptr;
}

struct Start {
  void* (*run)(void*);
  void* argument;
};

void* run_proxy(void* given) {
  const Start start = *static_cast<Start*>(given);
  delete static_cast<Start*>(given);
  is_proxy = true;
  return start.run(start.argument);
}

}  // namespace

void count(Kind kind, const void* caller) noexcept {
  if (!is_proxy || !counts.load(std::memory_order_relaxed) || is_network(caller)) return;
  const void* nobody = nullptr;
  first.compare_exchange_strong(nobody, caller);
  counters[kind].fetch_add(1);
}

/// The next function of this name: the library's. Looked up once, without allocation after that.
template <class Function>
Function* next_of(const char* name, std::atomic<Function*>& kept) noexcept {
  Function* found = kept.load(std::memory_order_acquire);
  if (found == nullptr) {
    found = reinterpret_cast<Function*>(dlsym(RTLD_NEXT, name));
    kept.store(found, std::memory_order_release);
  }
  return found;
}

int create(pthread_t* thread, const pthread_attr_t* attributes, void* (*run)(void*), void* argument) {
  static std::atomic<decltype(pthread_create)*> kept{nullptr};
  auto* next = next_of("pthread_create", kept);
  if (!makes_proxies.load()) return next(thread, attributes, run, argument);
  auto start = std::make_unique<Start>(Start{run, argument});
  const int status = next(thread, attributes, run_proxy, start.get());
  if (status == 0) (void)start.release();
  return status;
}

MakesProxies::MakesProxies() { makes_proxies.store(true); }
MakesProxies::~MakesProxies() { makes_proxies.store(false); }

Counted::Counted() {
  for (auto& counter : counters) counter.store(0);
  first.store(nullptr);
  counts.store(true);
}
Counted::~Counted() { counts.store(false); }
u64 Counted::of(Kind kind) const noexcept { return counters[kind].load(); }

const char* name_of(Kind kind) noexcept {
  constexpr std::array<const char*, kKinds> kNames{"allocations", "locks", "logs", "reads of the environment", "files"};
  return kNames[kind];
}

const char* first_caller() noexcept {
  static char text[300];
  const void* caller = first.load();
  Dl_info info;
  if (caller == nullptr || dladdr(caller, &info) == 0) return "nobody";
  const auto offset = static_cast<const char*>(caller) - static_cast<const char*>(info.dli_fbase);
  std::snprintf(text, sizeof text, "%s+0x%zx", info.dli_fname, static_cast<std::size_t>(offset));
  return text;
}

}  // namespace mk::test

#define MK_SEEN(kind) ::mk::test::count(::mk::test::kind, __builtin_return_address(0))
#define MK_PASS_ON(kind, result, name, parameters, ...)                   \
  MK_TAKES result name parameters {                                       \
    static std::atomic<result(*) parameters> kept{nullptr};               \
    MK_SEEN(kind);                                                        \
    return ::mk::test::next_of<result parameters>(#name, kept)(__VA_ARGS__); \
  }
#define MK_TAKES extern "C" __attribute__((visibility("default"), noinline))

// dlsym allocates, so these are passed on by names of their own
extern "C" {
void* __libc_malloc(std::size_t);
void* __libc_calloc(std::size_t, std::size_t);
void* __libc_realloc(void*, std::size_t);
void* __libc_memalign(std::size_t, std::size_t);
void __libc_free(void*);
}

MK_TAKES void* malloc(std::size_t bytes) {
  MK_SEEN(kAllocation);
  return __libc_malloc(bytes);
}
MK_TAKES void* calloc(std::size_t number, std::size_t bytes) {
  MK_SEEN(kAllocation);
  return __libc_calloc(number, bytes);
}
MK_TAKES void* realloc(void* old, std::size_t bytes) {
  MK_SEEN(kAllocation);
  return __libc_realloc(old, bytes);
}
MK_TAKES void* memalign(std::size_t alignment, std::size_t bytes) {
  MK_SEEN(kAllocation);
  return __libc_memalign(alignment, bytes);
}
MK_TAKES void* aligned_alloc(std::size_t alignment, std::size_t bytes) {
  MK_SEEN(kAllocation);
  return __libc_memalign(alignment, bytes);
}
MK_TAKES int posix_memalign(void** made, std::size_t alignment, std::size_t bytes) {
  MK_SEEN(kAllocation);
  *made = __libc_memalign(alignment, bytes);
  return *made == nullptr ? ENOMEM : 0;
}
MK_TAKES void free(void* old) {
  if (old != nullptr) MK_SEEN(kAllocation);
  __libc_free(old);
}

// of their own, too: the caller of the library's would be the library
#define MK_ALWAYS __attribute__((visibility("default"), noinline))
MK_ALWAYS void* operator new(std::size_t bytes) {
  MK_SEEN(kAllocation);
  if (void* made = __libc_malloc(bytes)) return made;
  throw std::bad_alloc();
}
MK_ALWAYS void* operator new(std::size_t bytes, std::align_val_t alignment) {
  MK_SEEN(kAllocation);
  if (void* made = __libc_memalign(static_cast<std::size_t>(alignment), bytes)) return made;
  throw std::bad_alloc();
}
MK_ALWAYS void operator delete(void* old) noexcept {
  if (old != nullptr) MK_SEEN(kAllocation);
  __libc_free(old);
}
MK_ALWAYS void operator delete(void* old, std::size_t) noexcept {
  if (old != nullptr) MK_SEEN(kAllocation);
  __libc_free(old);
}
MK_ALWAYS void operator delete(void* old, std::align_val_t) noexcept {
  if (old != nullptr) MK_SEEN(kAllocation);
  __libc_free(old);
}
MK_ALWAYS void operator delete(void* old, std::size_t, std::align_val_t) noexcept {
  if (old != nullptr) MK_SEEN(kAllocation);
  __libc_free(old);
}

MK_TAKES int pthread_create(pthread_t* thread, const pthread_attr_t* attributes, void* (*run)(void*), void* argument) {
  MK_SEEN(kAllocation);
  return ::mk::test::create(thread, attributes, run, argument);
}
MK_PASS_ON(kLock, int, pthread_mutex_lock, (pthread_mutex_t* mutex), mutex)
MK_PASS_ON(kLock, int, pthread_mutex_trylock, (pthread_mutex_t* mutex), mutex)
MK_PASS_ON(kLock, int, pthread_rwlock_rdlock, (pthread_rwlock_t* lock), lock)
MK_PASS_ON(kLock, int, pthread_rwlock_wrlock, (pthread_rwlock_t* lock), lock)
MK_PASS_ON(kLock, int, pthread_cond_wait, (pthread_cond_t* condition, pthread_mutex_t* mutex), condition, mutex)
MK_PASS_ON(kLog, ssize_t, write, (int file, const void* bytes, std::size_t count), file, bytes, count)
MK_PASS_ON(kLog, ssize_t, writev, (int file, const iovec* parts, int count), file, parts, count)
MK_PASS_ON(kLog, std::size_t, fwrite, (const void* bytes, std::size_t size, std::size_t count, FILE* file), bytes, size,
           count, file)
MK_PASS_ON(kLog, int, fputs, (const char* text, FILE* file), text, file)
MK_PASS_ON(kLog, int, fputc, (int letter, FILE* file), letter, file)
MK_PASS_ON(kLog, int, putchar, (int letter), letter)
MK_PASS_ON(kLog, int, puts, (const char* text), text)
MK_PASS_ON(kLog, int, vfprintf, (FILE* file, const char* format, va_list given), file, format, given)
MK_PASS_ON(kEnvironment, char*, getenv, (const char* name), name)
MK_PASS_ON(kEnvironment, char*, secure_getenv, (const char* name), name)
MK_PASS_ON(kFile, FILE*, fopen, (const char* path, const char* mode), path, mode)

MK_TAKES int fprintf(FILE* file, const char* format, ...) {
  MK_SEEN(kLog);
  va_list given;
  va_start(given, format);
  const int written = std::vfprintf(file, format, given);
  va_end(given);
  return written;
}
MK_TAKES int printf(const char* format, ...) {
  MK_SEEN(kLog);
  va_list given;
  va_start(given, format);
  const int written = std::vfprintf(stdout, format, given);
  va_end(given);
  return written;
}
MK_TAKES int open(const char* path, int flags, ...) {
  static std::atomic<int (*)(const char*, int, ...)> kept{nullptr};
  MK_SEEN(kFile);
  va_list given;
  va_start(given, flags);
  const auto mode = va_arg(given, mode_t);
  va_end(given);
  return ::mk::test::next_of<int(const char*, int, ...)>("open", kept)(path, flags, mode);
}
