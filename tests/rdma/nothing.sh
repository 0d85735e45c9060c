# In the virtual machine: it has booted and has its devices.
ls /sys/class/infiniband
