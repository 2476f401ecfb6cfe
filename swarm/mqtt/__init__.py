"""Discovery over MQTT, and a broker where there is none."""
