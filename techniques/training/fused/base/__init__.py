"""The shared base of a group: its layers compute each adapter's rows with that adapter's weights."""
