"""The devices of this machine in use: samples of their load and power, and the detection of broken ones."""
