# In the virtual machine: the proxy's tests over real ibverbs, between rxe0 and rxe1.
exec build/host-rdma/mkproxy_rdma_tests
