"""nsqadmin's ``/api`` and ``/config``, for the scripts that call them."""
