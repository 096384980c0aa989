"""From the kernel's source to a launch: ``source`` -> ``compiler`` -> ``cache`` -> ``driver``."""
