// Pins the oldest nsqd that builds as it was published, with libraries of its time.
module nsqtools/tests/go/old

go 1.17

require github.com/nsqio/nsq v1.1.0

require (
	github.com/BurntSushi/toml v0.3.1 // indirect
	github.com/blang/semver v3.5.1+incompatible // indirect
	github.com/bmizerany/perks v0.0.0-20141205001514-d9a9656a3a4b // indirect
	github.com/golang/snappy v0.0.4 // indirect
	github.com/judwhite/go-svc v1.0.0 // indirect
	github.com/julienschmidt/httprouter v1.3.0 // indirect
	github.com/mreiferson/go-options v0.0.0-20161229190002-77551d20752b // indirect
	github.com/nsqio/go-diskqueue v0.0.0-20180306152900-74cfbc9de839 // indirect
	github.com/nsqio/go-nsq v1.1.0 // indirect
	golang.org/x/sys v0.10.0 // indirect
)
