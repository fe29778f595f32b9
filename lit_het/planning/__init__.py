"""What a training step will cost, found out without the devices that it is to run on."""
