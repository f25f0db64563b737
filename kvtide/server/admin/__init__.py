"""What operators see and change: `/admin/storage`, and the report of `/admin/cache`."""
