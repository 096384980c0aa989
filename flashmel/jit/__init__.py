"""From the kernel's source to a launch.

``source`` names a kernel; ``driver.cubin`` looks in ``bundle``, then ``cache``, then asks ``compiler``; ``driver.Kernel`` loads and
launches it.
"""
