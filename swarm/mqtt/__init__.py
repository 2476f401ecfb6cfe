"""Discovery over MQTT, and a broker for those who have none."""
