"""What ties Cadenza to other libraries; none of them is needed to import this."""
