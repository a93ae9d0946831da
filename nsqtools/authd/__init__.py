"""The auth server of nsqd, and views of a cluster without topics that are hidden from a user.

passwords     scrypt, remembered right answers, and waits after wrong ones
users         the users file and the permissions in it, or in permissions.csv (pure)
authority     the user that a secret, a JWT, a certificate or an address names; the audit log
auth_api      /auth for nsqd, /metrics, /health
views         documents of nsqlookupd and nsqd without what a user may not see (pure)
filter_api    these documents over HTTP
daemon        both on their sockets
"""
