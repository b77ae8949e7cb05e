"""The demo model: trained here, shipped in `ppd_runtime/models/demo`."""
