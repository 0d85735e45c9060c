# In the virtual machines: the proxy's tests over real ibverbs; each machine's own first, then those of the pair.
# $WITH_TORCH: the long run, with two Python processes whose proxies meet through the process group's store; there the
# first machine takes the faults that wait longest over from the second, which needs longer.
program=build/host/mkproxy_rdma_tests
status=0
case $VM_RANK$WITH_TORCH in
    0) own="device rc srd" ;;
    1) own="unordered" ;;
    0yes) own="device rc srd unordered/pyverbs unordered/a_killed unordered/a_link unordered/packets" ;;
    1yes) own="unordered/every unordered/flags unordered/many unordered/a_full unordered/a_receiver unordered/a_wrong
               unordered/a_peer" ;;
esac
$program $own || status=1
if [ "$VM_RANK" = 0 ]; then # what `doctor` shows of the NICs, by libraries that are not ours
    view=$(/usr/bin/python3 -I mkcompile/inspect/doctor/pyverbs_view.py 2>&1) && echo "ok doctor/$view" || status=1
fi
[ -n "$VM_ADDRESS" ] || exit $status
if [ -n "$WITH_TORCH" ]; then # torch is imported while the pair's tests wait, and the ranks begin after them
    export GLOO_SOCKET_IFNAME=wire OMP_NUM_THREADS=1
    mkfifo /tmp/begin
    nice -n 19 .venv/bin/python -B -m tests.rdma.bootstrap_rank </tmp/begin 2>&1 &
    ranks=$!
    exec 3>/tmp/begin
fi
$program pair || status=1
[ -n "$WITH_TORCH" ] || exit $status
renice -n 0 -p $ranks >/dev/null
echo >&3
wait $ranks
ended=$?
killed=137 # rank 1 does that to itself
[ $ended = $((VM_RANK * killed)) ] || status=1
exit $status
