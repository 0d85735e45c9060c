# In the virtual machines: the proxy's tests over real ibverbs; each machine's own first, then those of the pair. With
# $BOOTSTRAP also two Python processes with torch, whose proxies meet through the process group's store.
program=build/host-rdma/mkproxy_rdma_tests
status=0
if [ "$VM_RANK" = 0 ]; then own="device rc srd"; else own=unordered; fi
$program $own || status=1
[ -n "$VM_ADDRESS" ] || exit $status
$program pair || status=1
[ -n "$BOOTSTRAP" ] || exit $status
export GLOO_SOCKET_IFNAME=wire OMP_NUM_THREADS=1
.venv/bin/python -B -m tests.rdma.bootstrap_rank 2>&1
ended=$?
killed=137 # rank 1 does that to itself
[ $ended = $((VM_RANK * killed)) ] || status=1
exit $status
