"""``nsq web``: a console in the browser, nsqadmin's API, and /metrics for a whole cluster."""
