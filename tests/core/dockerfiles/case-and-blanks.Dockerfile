  # a comment
	from	registry.invalid/base@sha256:aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa	As	Base
 	Run true
workdir /x
FROM  base
copy	a	/a
