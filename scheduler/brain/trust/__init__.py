"""Whether replicas compute what they should: what they say is compared with what others compute."""
