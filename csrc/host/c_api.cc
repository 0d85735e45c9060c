#include "host/c_api.h"

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>

#include "host/cuda/engine.h"
#include "host/session.h"
#include "host/transports.h"

using mk::u32;
using mk::u64;
using mk::u8;
using mk::host::Error;
using mk::host::Session;

struct MkProxy {
  std::unique_ptr<Session> session;
};

struct MkCudaEngine {
  std::unique_ptr<mk::host::cuda::Engine> engine;
};

namespace {

int give(const Error& from, Error* to) {
  *to = from;
  return from.number;
}

u64 deadline(u64 limit_ns) {
  const u64 now = mk::host::now_ns();
  return limit_ns > ~u64{0} - now ? ~u64{0} - 1 : now + limit_ns;
}

}  // namespace

void mk_transport_missing(u32 kind, char* text, u32 bytes) {
  std::snprintf(text, bytes, "%s", mk::host::missing_for(static_cast<mk::TransportKind>(kind)).c_str());
}

int mk_proxy_open(const mk::ProxyOptions* options, MkProxy** proxy, Error* error) {
  std::unique_ptr<Session> session = Session::open(*options, *error);
  if (!session) return error->number;
  *proxy = new MkProxy{std::move(session)};
  return 0;
}

int mk_proxy_endpoint(MkProxy* proxy, u32 peer, u8* blob, u32* bytes, Error* error) {
  std::vector<u8> made;
  if (Error failure = proxy->session->endpoint(peer, made)) return give(failure, error);
  if (made.size() > *bytes) return give(mk::host::fail({"endpoint"}, EMSGSIZE, "%zu bytes", made.size()), error);
  std::copy(made.begin(), made.end(), blob);
  *bytes = static_cast<u32>(made.size());
  return 0;
}

int mk_proxy_connect(MkProxy* proxy, u32 peer, const u8* blob, u32 bytes, Error* error) {
  return give(proxy->session->connect(peer, {blob, bytes}), error);
}

int mk_proxy_finish(MkProxy* proxy, u64 limit_ns, Error* error) {
  return give(proxy->session->finish(deadline(limit_ns)), error);
}

int mk_proxy_start(MkProxy* proxy, Error* error) { return give(proxy->session->proxy().start(), error); }

void mk_proxy_facts(MkProxy* proxy, MkFacts* facts) {
  Session& session = *proxy->session;
  *facts = {reinterpret_cast<u64>(session.control()), reinterpret_cast<u64>(session.slots()),
            static_cast<u32>(session.proxy().transport().registration()),
            session.proxy().transport().counts() ? 1u : 0u, {}};
  std::snprintf(facts->device, sizeof facts->device, "%s", session.proxy().transport().device());
}

int mk_proxy_fault(MkProxy* proxy, Error* error) { return proxy->session->proxy().fault(*error) ? 1 : 0; }

void mk_proxy_counters(MkProxy* proxy, u64* counters) {
  for (u32 i = 0; i < mk::kNumCounters; ++i) {
    counters[i] = proxy->session->proxy().counters().get(static_cast<mk::ProxyCounter>(i));
  }
}

u32 mk_proxy_timeline(MkProxy* proxy, u64 from, mk::ProxyEvent* events, u32 room, u64* next) {
  return proxy->session->proxy().timeline().read(from, {events, room}, *next);
}

int mk_proxy_push(MkProxy* proxy, const mk::Command* command, u64 limit_ns, u64* ticket) {
  return proxy->session->producer().push(*command, deadline(limit_ns), *ticket);
}

int mk_proxy_wait_retired(MkProxy* proxy, u64 ticket, u64 limit_ns) {
  return proxy->session->producer().wait_retired(ticket, deadline(limit_ns));
}

int mk_proxy_wait_flag(MkProxy* proxy, u32 chunk, u32 epoch, u64 limit_ns, u32* seen) {
  return proxy->session->wait_flag(chunk, epoch, deadline(limit_ns), *seen);
}

int mk_proxy_close(MkProxy* proxy, u64 limit_ns, Error* error) {
  const Error failure = proxy->session->proxy().stop(deadline(limit_ns));
  if (failure.number == 0 || proxy->session->proxy().stopped()) delete proxy;
  return give(failure, error);
}

int mk_cuda_engine_open(int device, u32 streams, MkCudaEngine** engine, MkHooks* hooks, Error* error) {
  mk::host::cuda::Driver driver{};
  if (Error failure = mk::host::cuda::load_driver(driver)) return give(failure, error);
  auto made = mk::host::cuda::Engine::open(driver, device, *error, streams);
  if (!made) return error->number;
  const mk::host::CopyEngine copies = made->copies();
  const mk::host::FlagWriter flags = made->flags();
  *hooks = {reinterpret_cast<u64>(copies.context), reinterpret_cast<u64>(copies.start),
            reinterpret_cast<u64>(copies.finished), reinterpret_cast<u64>(copies.pin),
            reinterpret_cast<u64>(copies.unpin), reinterpret_cast<u64>(flags.write),
            reinterpret_cast<u64>(flags.commit), made->write_order(), 0};
  *engine = new MkCudaEngine{std::move(made)};
  return 0;
}

void mk_cuda_engine_close(MkCudaEngine* engine) { delete engine; }

int mk_cuda_export(MkCudaEngine* engine, u64 address, u64 bytes, int* descriptor, u64* offset, Error* error) {
  return give(engine->engine->export_memory(address, bytes, *descriptor, *offset), error);
}
