"""What Prometheus, Alertmanager and Grafana are given, described once: expressions, alerts, panels, and their files."""
