# In the virtual machines: the proxy's tests over real ibverbs; each machine's own first, then those of the pair.
program=build/host-rdma/mkproxy_rdma_tests
status=0
if [ "$VM_RANK" = 0 ]; then own="device rc srd"; else own=unordered; fi
$program $own || status=1
[ -z "$VM_ADDRESS" ] || $program pair || status=1
exit $status
