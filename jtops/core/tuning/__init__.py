"""The tuning of user kernels: configs measured on the device."""
